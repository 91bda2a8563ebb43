"""The runs whose flags are in argv[1], one after the other; those with "evaluate" first only evaluate."""

import json
import sys

import train
from launch import evaluate

jobs = json.loads(sys.argv[1])
acc = train.start(train.Config.from_flags([flag for flag in jobs[0] if flag != "evaluate"]))
for flags in jobs:
    c = train.Config.from_flags([flag for flag in flags if flag != "evaluate"])
    if flags[0] == "evaluate":
        evaluate.run(c, acc, *evaluate.prepare(c))
    else:
        train.train(c, acc, *train.prepare(c))
train.dist.barrier()
train.os._exit(0)
