"""Data: what a file and its rows may hold, the built-in task, and which answers count as equal."""

import itertools
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import AIME, CHATS, GSM8K, jsonl

import train
from launch import cold_start
from launch.lib import data, grade, reward

ROOT = Path(__file__).resolve().parents[1]

# --- files


def write(tmp_path, content: bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return path


def test_a_file_from_another_system_reads_as_usual(tmp_path):
    """BOM, CRLF, blank lines, a last line without an end; numbers become strings, other keys stay.

    Catches a BOM taken for JSON, U+2028 inside a string taken for a line break, and answers that equal no string.
    """
    path = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "1+2=", "answer": 3, "level": 1}\r\n\r\n  \n'
        b'{"prompt": "half\xe2\x80\xa8of 1", "answer": 0.5}\r\n{"prompt": 7, "answer": "\\\\pi"}',
    )
    assert data.load_data(path) == [
        {"prompt": "1+2=", "answer": "3", "level": 1},
        {"prompt": "half\u2028of 1", "answer": "0.5"},
        {"prompt": "7", "answer": r"\pi"},
    ]


SOUND = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SOUND * 2 + b'{"prompt": "a", "ans\n' + SOUND, "data.jsonl:3: not JSON in UTF-8"),
        (SOUND + b'\r\n{"prompt": "\xff", "answer": "b"}', "data.jsonl:3: not JSON in UTF-8"),
        (SOUND + b'{"prompt": "a"}', "data.jsonl:2: needs an object with 'answer'"),
        (SOUND + b'{"answer": "b"}', "data.jsonl:2: needs an object with 'prompt'"),
        (SOUND + b'{"prompt": "a", "answer": null}', "data.jsonl:2: needs .*'answer'"),
        (SOUND + b'{"prompt": "a", "answer": true}', "data.jsonl:2: needs .*'answer'"),
        (SOUND + b'["a", "b"]', "data.jsonl:2: needs an object"),
        (b"", "data.jsonl: no examples in it"),
        (b"\r\n\n", "data.jsonl: no examples in it"),
    ],
)
def test_a_broken_file_is_an_error_with_file_and_line(tmp_path, content, says):
    """The first broken line, by its number in the file. Catches lines skipped in silence, a count that leaves out blank lines, and the answer "None"."""
    with pytest.raises(ValueError, match=says):
        data.load_data(write(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path):
    """A path that is missing or a folder is a ValueError that names it, as every mistake of a user."""
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            data.load_data(path)


def test_prompts_that_do_not_fit_are_dropped_and_counted(tiny, tmp_path, capsys):
    """Of prompts of 0, 5, 6 and 9 characters (a token each) room for 5 leaves one, room for 6 two.

    Catches an off-by-one at the limit, drops that nobody sees, and a run that starts with nothing left.
    """
    lines = [f'{{"prompt": "{"x" * n}", "answer": "{n}"}}\n' for n in (0, 5, 6, 9)]
    path = str(write(tmp_path, "".join(lines).encode()))
    # x is chr(120): after <pad>, <eos> and \n, 120 - 32 + 3 = 91
    want = [{"prompt": "x" * n, "answer": str(n), "tokens": [91] * n} for n in (5, 6)]
    assert data.load_prompts(path, tiny(), 5, seed=0) == want[:1]
    assert "3 of 4 prompts do not fit, dropped" in capsys.readouterr().out
    assert data.load_prompts(path, tiny(), 6, seed=0) == want
    assert "2 of 4 prompts do not fit, dropped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no prompt fits into 4 tokens"):
        data.load_prompts(path, tiny(), 4, seed=0)


# --- what its rows may look like


def test_field_names_of_the_common_sets(tmp_path):
    """GSM8K's, AIME's and chat rows: prompt and answer are found, other keys stay, and each answer is graded as meant.

    Catches a solution that hides the answer beside it, a reply that stays in the prompt, and a whole solution taken
    for the answer.
    """
    gsm8k, aime, chats = (
        data.load_data(jsonl(tmp_path / f"{i}.jsonl", e))
        for i, e in enumerate((GSM8K, AIME, CHATS))
    )
    assert [e["prompt"] for e in gsm8k] == [e["question"] for e in GSM8K]
    assert aime[0] == AIME[0] | {"prompt": AIME[0]["problem"]} and aime[2]["answer"] == "204"
    assert [(e["prompt"], e["answer"]) for e in chats] == [
        ("2+2?", "4"),
        ("1+1?", r"\boxed{2}"),
        ("3+3?", "6"),
    ]
    assert [len(e["messages"]) for e in chats] == [2, 1, 1]
    right = [r"\boxed{72}", "It is 10.", r"\boxed{\sqrt{12}}", r"\boxed{1.5}", "204", "4", "2", "6"]
    for response, example in zip(right, gsm8k + aime + chats, strict=True):
        assert reward.math_reward(response, example["answer"]) == 1, (response, example)
        assert reward.math_reward(r"\boxed{24}", example["answer"]) == 0, example


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"problem": "a"}, "needs an object with 'answer' .or 'solution', 'ground_truth'"),
        ({"problem": None, "answer": "b"}, "needs an object with 'prompt'"),
        ({"messages": [], "answer": "b"}, "messages must be"),
        (
            {"messages": [{"role": "system", "content": "x"}], "answer": "b"},
            "one of them by the user",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}], "answer": "b"}, "messages must be"),
        ({"messages": [{"role": "user", "content": "x"}]}, "needs an object with 'answer'"),
        ({"prompt": "a", "answer": ["b"]}, "needs an object with 'answer'"),
    ],
)
def test_rows_that_lack_something_are_named(tmp_path, row, says):
    """File, line and what is missing. Catches the answer "None", and a chat without a question."""
    with pytest.raises(ValueError, match=f"data.jsonl:2: .*{says}"):
        data.load_data(jsonl(tmp_path / "data.jsonl", [AIME[0], row]))


def test_templates(chatty, tiny, tmp_path):
    """The chat template where the model has one, the text alone where not, --prompt-template over both.

    Catches a template that is applied twice or to one format only, and braces of LaTeX taken for fields.
    """
    decode = data.tokenizer_of(chatty).decode

    def prompts(model, examples, template=""):
        path = str(jsonl(tmp_path / "data.jsonl", examples))
        return [
            decode(e["tokens"]) for e in data.load_prompts(path, model, 200, 0, template=template)
        ]

    assert prompts(chatty, GSM8K[1:]) == ["<user>12 an hour, 50 minutes?\n<assistant>"]
    assert prompts(chatty, CHATS[:2]) == [
        "<system>Be brief.\n<user>2+2?\n<assistant>",
        "<user>1+1?\n<assistant>",
    ]
    assert prompts(tiny(), CHATS[:2]) == ["Be brief.\n2+2?", "1+1?"]
    template = r"Q: {prompt} Use \boxed{}. {"
    assert prompts(chatty, CHATS[:1], template) == [r"Q: 2+2? Use \boxed{}. {"]
    assert prompts(tiny(), GSM8K[1:], "{prompt}") == [GSM8K[1]["question"]]


def test_several_files_and_their_names(tiny, tmp_path):
    """--data a,b holds both, each example with its name; addition keeps its own rule beside math."""
    a, b = (str(jsonl(tmp_path / f"{n}.jsonl", e)) for n, e in (("a", GSM8K), ("b", AIME)))
    c = train.Config(model=str(tiny()), data=f"{a}, {b},addition", eval_data=b, max_new_tokens=100)
    examples, held_out = data.prepare(c, 256)
    assert [e["data"] for e in examples] == [a] * 2 + [b] * 3 + ["addition"] * 4096
    assert [e["data"] for e in held_out] == [b] * 3
    sums = examples[-1]
    assert reward.auto("", "#" + sums["answer"], sums["answer"], sums) == 1
    assert reward.auto("", sums["answer"], sums["answer"], sums) == 0  # no mark
    assert reward.auto("", "so 72", examples[0]["answer"], examples[0]) == 1
    c.data = f"{a},"
    with pytest.raises(ValueError, match="empty name"):
        data.prepare(c, 256)


# --- the built-in task


def test_addition_is_a_function_of_its_seed(tiny):
    """Same seed, same list, whatever was drawn before; sums are right and of fixed width, and both halves vary.

    Catches a task drawn from the process's own generator, which differs between ranks and after a resume.
    """
    problems = data.addition(500, seed=3)
    assert problems == data.addition(500, seed=3) != data.addition(500, seed=4)
    assert problems[:100] == data.addition(100, seed=3)
    for problem in problems + data.addition(50, seed=0, digits=2):
        a, b = problem["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == len(problem["answer"]) - 1, problem
        assert int(a) + int(b) == int(problem["answer"]), problem
    assert len({p["prompt"][:4] for p in problems}) > 450
    assert any(p["prompt"].startswith("0") for p in problems)  # padded: 0042+1234=
    loaded = data.load_prompts("addition", tiny(), 10, seed=3, n=500)  # 4 + 1 + 4 + 1 tokens
    assert [{k: p[k] for k in ("prompt", "answer")} for p in loaded] == problems


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("1234+5678=", "4+8+0=12 3+7+1=11 2+6+1=09 1+5+0=06 #06912"),
        # 9+1=10, then 9+0+1=10 three times: 9999 + 1 = 10000
        ("9999+0001=", "9+1+0=10 9+0+1=10 9+0+1=10 9+0+1=10 #10000"),
        ("05+03=", "5+3+0=08 0+0+0=00 #008"),
    ],
)
def test_column_scratchpad_by_hand(prompt, want):
    """Columns from the right with their carries, then the answer. Catches a lost last carry and a reversed answer."""
    assert cold_start.columns(prompt, 0.0, random.Random(0)) == want


def test_the_worked_response_earns_the_reward():
    """The worked response of every style answers what addition asks, on 200 problems; with errors in most it does not.
    Catches rules that disagree about the format.
    """
    for problem, style in itertools.product(data.addition(200, seed=1), cold_start.STYLES.values()):
        response = style(problem["prompt"], 0.0, random.Random(0))
        assert reward.addition_reward(response, problem["answer"]) == 1.0, problem
        assert len(response) < 64
    for style in cold_start.STYLES.values():
        rng, problems = random.Random(0), data.addition(200, seed=1)
        right = [
            reward.addition_reward(style(p["prompt"], 0.16, rng), p["answer"]) for p in problems
        ]
        assert 0.35 < sum(right) / 200 < 0.65, style  # 0.84 ** 4 = 0.50


@pytest.mark.parametrize(
    ("style", "want"),
    [
        (cold_start.places, "1+5=06 2+6=08 3+7=10 4+8=12 #06912"),
        (cold_start.running, "+5000=06234 +0600=06834 +0070=06904 +0008=06912 #06912"),
    ],
)
def test_other_styles_by_hand(style, want):
    """The two other teachers of Fig. 5 on 1234+5678. Catches a place value or a total that is off."""
    assert style("1234+5678=", 0.0, random.Random(0)) == want


def test_addition_reward_by_hand():
    """1 for what follows the last #, digit for digit. Catches a first # that counts, and 6912 passing for 06912."""
    for response in ("4+8+0=12 #06912", "#06912", "#06911 #06912", "# 06912\n"):
        assert reward.addition_reward(response, "06912") == 1.0, response
    for response in ("", "06912", "#6912", "#006912", "#06912 #06911", "#06912#", "#06912 1"):
        assert reward.addition_reward(response, "06912") == 0.0, response


# --- grading of mathematics


@pytest.mark.parametrize(
    ("given", "answer", "right"),
    [
        (r"\frac12", r"\frac12", 1),
        (r"\sqrt{2}", r"\sqrt{2}", 1),
        ("(1,2)", "(1,2)", 1),
        (r"\pi", r"\pi", 1),
        ("x^2+1", "x^2+1", 1),
        (r"2\sqrt{3}", r"2\sqrt{3}", 1),
        ("3,4", "3,4", 1),
        ("3", 3, 1),  # the integer of JSON
        (r"\frac{1}{2}", "0.5", 1),
        ("1+x^2", "$x^2+1$", 1),
        ("2", r"2\sqrt{3}", 0),
        ("3.4", "3,4", 0),
        ("3,4", "3.4", 0),
        ("4", 3, 0),
        ("(2,1)", "(1,2)", 0),
    ],
)
def test_boxed_answers(given, answer, right):
    """A bare LaTeX answer equals itself boxed, by text and by math-verify alone, and no look-alike.

    Catches an answer that is read without its box: 2\\sqrt{3} as 2, 3,4 as 3.4 or 34.
    """
    assert reward.math_reward(f"So it is \\boxed{{{given}}}.", answer) == right
    # reward() takes equal texts for equal; the grader must agree
    assert grade.equal(str(answer).strip("$"), given) == bool(right)


@pytest.mark.parametrize(
    ("response", "final"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}, I say.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1 \right\}}", r"\left\{ 1 \right\}"),  # \{ and \} do not count
        (r"\boxed{ $3$ }", "3"),
        (r"It is 4: \boxed{3", None),  # never closes: no answer, not the 4, not the 3
        (r"\boxed{4} \boxed{\frac{3}{2}", None),  # not the earlier box
        (r"\boxed{3\}", None),
        ("7 = 10-3", "3"),  # a minus sign between numbers is no sign
        ("It is -3.", "-3"),
        ("between 1,234.5 and 1/2", "1/2"),
        ("all of 1,234.5", "1,234.5"),
        ("3,4", "4"),
        ("none", None),
        ("", None),
    ],
)
def test_final_answer_by_hand(response, final):
    """The last box, whole; without one the last number. Catches a truncated box that is graded by its beginning."""
    assert grade.final_answer(response) == final
    assert reward.math_reward(response, final or "3") == float(final is not None)


# kind -> (response, answer, is it right), decided by hand: what this project reads before math-verify does.
PAIRS = {
    "commas": [
        (r"\boxed{1,234}", "1234", 1),
        (r"\boxed{1{,}234}", "1234", 1),
        (r"\boxed{1,234,567}", "1234567", 1),
        ("It is 2125.", "2,125", 1),
        (r"\boxed{12,345}", "12346", 0),
        (r"\boxed{10\,000}", "10000", 1),
        (r"\boxed{10\ 000}", "10000", 1),
    ],
    "several boxes": [(r"\boxed{1} \boxed{2}", "2", 1), (r"\boxed{2} \boxed{1}", "2", 0)],
    "no box": [("The answer is 42.", "42", 1), ("First 41, then 42", "41", 0)],
    "unclosed box": [(r"\boxed{42", "42", 0)],
    "text": [
        (r"\boxed{\text{Monday}}", "Monday", 1),
        (r"\boxed{\text{Monday}}", r"\text{Monday}", 1),
        (r"\boxed{Tuesday}", r"\text{Monday}", 0),
        (r"\boxed{C}", "C", 1),
        (r"\boxed{\text{(C)}}", "C", 1),
        (r"\boxed{\textbf{(C)}}", "C", 1),
        (r"\boxed{B}", "C", 0),
        (r"\boxed{\text{Yes}}", "Yes", 1),
    ],
    "mixed numbers": [
        (r"\boxed{2\frac{1}{2}}", r"\frac{5}{2}", 1),
        (r"\boxed{2\frac{1}{2}}", "2.5", 1),
        (r"\boxed{2 1/2}", "2.5", 1),
        (r"\boxed{2\frac{1}{2}}", "1", 0),
        (r"\boxed{-2\frac12}", "-2.5", 1),
        (r"\boxed{-2 1/2}", "-2.5", 1),
        (r"\boxed{-2\tfrac{1}{2}}", "-1.5", 0),
    ],
    "scientific": [
        (r"\boxed{1.2\times 10^{3}}", "1200", 1),
        (r"\boxed{1.2 \cdot 10^3}", "1200", 1),
        (r"\boxed{1.2e3}", "1200", 1),
        (r"\boxed{3\times10^{-2}}", "0.03", 1),
        (r"\boxed{3\times10^{2}}", "30", 0),
        ("It is 1.2e3.", "1200", 1),
    ],
    "unicode minus": [
        ("\\boxed{\u22125}", "-5", 1),
        ("It is \u22125.", "-5", 1),
        ("\\boxed{\u22125}", "5", 0),
        ("It is \u22125.", "5", 0),
    ],
    "trailing period": [(r"\boxed{7.}", "7", 1), ("So 7.", "7", 1), (r"\boxed{7}", "7.", 1)],
    "huge powers": [
        (r"\boxed{2^{100}}", "1267650600228229401496703205376", 1),
        (r"\boxed{10^{10^{10}}}", "10", 0),
    ],
    "empty": [(r"\boxed{}", "3", 0), ("", "3", 0), (" \n", "3", 0), (r"\boxed{}", "", 0)],
    "AIME's three digits": [(r"\boxed{025}", "25", 1), (r"\boxed{25}", "025", 1)],
    "solutions": [
        (r"\boxed{72}", r"We find \boxed{72}.", 1),
        (r"\boxed{12}", r"12 and then \boxed{72}.", 0),
        (r"\boxed{\frac{1}{2}}", r"$\frac{1}{2}$", 1),
    ],
    "spacing": [
        (r"\boxed{ 7 }", "7", 1),
        (r"\boxed {\frac{1}{2}}", "0.5", 1),
        (r"\fbox{7}", "7", 1),
    ],
}


@pytest.mark.parametrize("kind", PAIRS)
def test_grading_pairs(kind):
    """A right answer in another form counts, a look-alike does not.

    Catches a sign of Unicode that is lost (-5 graded as 5), thousands read as lists, an open end taken for a closed one.
    """
    for response, answer, right in PAIRS[kind]:
        assert reward.math_reward(response, answer) == right, (response, answer)


def test_an_answer_that_cannot_be_computed_scores_0_within_seconds():
    """10^{10^{10}}, from two threads at once: 0 after 3 CPU seconds, and the next response is graded as usual.

    Catches a time limit by alarm, which works in the main thread only and not inside one long multiplication; a grader
    that stays dead after it was killed; and a verdict that goes to the other thread.
    """
    assert reward.math_reward(r"\boxed{6/2}", "3") == 1.0  # the one grader is running
    results = {}

    def score(name, given):
        results[name] = [
            reward.math_reward(rf"\boxed{{{given}}}", "3") for given in (given, "3.0", "4")
        ]

    threads = [
        threading.Thread(target=score, args=pair, daemon=True)
        for pair in (("tower", "10^{10^{10}}"), ("sound", "6/2"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # 3 s of CPU time, a new grader's start, a busy machine
    assert results == {"tower": [0.0, 1.0, 0.0], "sound": [1.0, 1.0, 0.0]}
    assert reward.math_reward(r"\boxed{" + "1+" * 150 + "1}", "151") == 0.0  # 301 characters


def test_gsm8k_answers_count_after_their_marks():
    """The answer of a GSM8K line is what follows ####. Catches a whole solution taken for the answer, never equal."""
    gold = "48/2 = 24 clips in May, 48+24 = 72 in all.\n#### 72"
    assert [reward.math_reward(r, gold) for r in (r"\boxed{72}", "so 72", r"\boxed{24}")] == [
        1,
        1,
        0,
    ]


def test_a_cold_start_from_demonstrations_of_ones_own(tmp_path):
    """Prompts of different lengths, each response masked by hand; every row is seen as often as any other, to one; the
    folder is made again when the file has changed. Catches one length for all prompts, and a file that is read in part.
    """
    pairs = [("sort 21>", "12"), ("sort 3>", "3")]
    tokens, mask = cold_start.encode(pairs)
    assert bytes(tokens[1]) == b"sort 3>3\x01\x00\x00" and mask.int().tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
    ]
    file = jsonl(tmp_path / "mine.jsonl", [{"prompt": p, "response": r} for p, r in pairs])
    picked = cold_start.of_file(file, 41, seed=0)
    assert sorted(picked.count(pair) for pair in pairs) == [20, 21]
    flags = f"--out {tmp_path}/model --steps 1 --demonstrations {file}"
    args = [sys.executable, str(ROOT / "launch" / "cold_start.py"), *flags.split()]
    for again in ("parameters", "left alone", "parameters"):
        done = subprocess.run(args, capture_output=True, text=True, check=True)
        assert again in done.stdout, done
        if again == "left alone":
            jsonl(file, [{"prompt": p, "response": r} for p, r in pairs[:1]])
    tokenizer = data.tokenizer_of(tmp_path / "model")
    assert tokenizer.encode("sort") == list(b"sort")
    assert tokenizer.model_max_length > 512  # the folder's, of which transformers would warn


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"prompt": "", "response": "b"},
        {"prompt": "é", "response": "b"},
        {"prompt": "a", "response": "b\x01"},
        {"prompt": "a" * 500, "response": "b" * 12},
        {"prompt": "a", "response": 1},
        [],
    ],
)
def test_a_demonstration_that_cannot_be_learned_is_named(tmp_path, row):
    """File, line and what it needs. Catches text that would become padding, an end or an unknown token."""
    file = jsonl(tmp_path / "mine.jsonl", [{"prompt": "a", "response": "b"}, row])
    with pytest.raises(ValueError, match=f"{file}:2: needs"):
        cold_start.of_file(file, 64, seed=0)
