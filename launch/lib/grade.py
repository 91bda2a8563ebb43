r"""Grading of math: the final answer of a response, and math-verify's verdict on it.

math-verify runs in a process of its own, which is this file run as a program: a JSON pair
(gold, answer) per line in, 0 or 1 per line out. Nothing else stops 10^{10^{10}}: math-verify's own
limit is an alarm signal, which works in main threads and in interruptible code only.
"""

import functools
import json
import re
import resource
import signal
import subprocess
import sys
import threading

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
GRADING = threading.Lock()


def final_answer(response: str) -> str | None:
    r"""The content of the last \boxed{...}, None if it never closes; without one, a number."""
    response = response.replace("\u2212", "-")
    boxes = list(BOX.finditer(response))
    if not boxes:
        number = rf"(?:(?<![\w)])-)?{NUMBER}(?:/\d+|[eE][+-]?\d+)?"
        return (re.findall(number, response) or [None])[-1]

    rest = response[boxes[-1].end() :]
    depth = 1
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # \{ and \} are no braces
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[: token.start()].strip().strip("$")
    return None


def gold(answer: object) -> str:
    """The answer in a data set's field: all of it, the text after GSM8K's ####, or its last box."""
    text = str(answer).rpartition("####")[2].strip()
    return plain(final_answer(text) or text if BOX.search(text) else text)


def plain(text: str) -> str:
    """The same answer in words that math-verify reads.

    No final period, no space between thousands, no Unicode minus; 2 1/2 and 1.2e3 written out.
    """
    text = text.strip().strip("$").replace("\u2212", "-").removesuffix(".").strip()
    text = re.sub(r"(?<=\d)(?:\\[, !;:]|~)(?=\d{3}(?!\d))", "", text)
    mixed = re.fullmatch(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)", text)
    if mixed:
        return "{}({} + \\frac{{{}}}{{{}}})".format(*mixed.groups())
    scientific = re.fullmatch(rf"([+-]?{NUMBER})[eE]([+-]?\d+)", text)
    if scientific:
        return "{} \\times 10^{{{}}}".format(*scientific.groups())
    return text


@functools.cache
def grader() -> subprocess.Popen:
    """The grader's process."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # -P: the files beside this one are not modules of the program. A Ctrl-C is not meant for it.
    command = [sys.executable, "-P", __file__]
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


def equal(gold: str, answer: str) -> bool:
    """math-verify's verdict, from any thread. False if it takes over 3 CPU seconds or 4 GB."""
    with GRADING:
        process = grader()
        if process.poll() is not None:  # ended while it was idle, for want of memory, say
            grader.cache_clear()
            process = grader()
        print(json.dumps([gold, answer]), file=process.stdin, flush=True)
        verdict = process.stdout.readline()
        if not verdict:  # dead: out of time and killed by the signal, or never started
            process.communicate()
            grader.cache_clear()
            if process.returncode > 0:
                raise ValueError("the math grader failed; is math-verify installed?")
    return verdict == "1\n"


def main() -> None:
    """The grader: answers each line until its input ends."""
    from math_verify import LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    options = {"fallback_mode": "no_fallback", "parsing_timeout": 0}
    for pair in sys.stdin:
        # CPU time, so that no verdict depends on how busy the machine is. Nothing handles the
        # signal: it ends the process, even in the middle of one long multiplication.
        signal.setitimer(signal.ITIMER_PROF, 3)
        try:
            # Both sides boxed: bare, 2\sqrt{3} could be read as 2, and 3,4 as 3.4.
            boxes = [f"\\boxed{{{text}}}" for text in json.loads(pair)]
            gold, answer = (parse(box, [LatexExtractionConfig()], **options) for box in boxes)
            same = verify(gold, answer, timeout_seconds=0)
        except Exception:  # math-verify and sympy raise anything on odd expressions: not the same
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(same), flush=True)


if __name__ == "__main__":
    main()
