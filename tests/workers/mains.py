"""Each case of the JSON file argv[1] in train.main, a fork a case, so that torch is imported once."""

import importlib.util
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import train

train.start = lambda c: print("an engine would have started", file=sys.stderr) or os._exit(99)

find = importlib.util.find_spec


def find_all_but(hidden, name, *more):
    return None if name == hidden else find(name, *more)


results = []
for hidden, flags in json.loads(Path(sys.argv[1]).read_text()):
    with tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            os.dup2(err.fileno(), 2)
            importlib.util.find_spec = partial(find_all_but, hidden)
            sys.argv = ["train.py", *flags]
            try:
                train.main()
            except SystemExit as end:  # without the second that Python takes to leave torch
                sys.stderr.flush()
                os._exit(end.code)
        _, status = os.waitpid(child, 0)
        err.seek(0)
        results.append((os.waitstatus_to_exitcode(status), err.read()))
print(json.dumps(results))
