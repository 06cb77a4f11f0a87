"""Prompt files in the layouts of known benchmarks, and answers read from outputs."""

import json

import pytest

from labkit.workloads import final_number, load_prompt_file

CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("line", "prompt_id", "last", "answer"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["One.", "Two."]}, "81", "One.", None),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": ""},
            "HumanEval/0",
            "def f():",
            None,
        ),
        ({"question": "How many?", "answer": "2 + 3\n#### 1,205"}, "f-01", "How many?", "1205"),
        ({"messages": CONVERSATION, "id": "a"}, "a", "hi", None),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, "f-01", "hi", None),
        ({"prompt": "hello", "id": "own"}, "own", "hello", None),
    ],
)
def test_known_layouts(tmp_path, line, prompt_id, last, answer):
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (prompt,) = load_prompt_file(file)
    assert (prompt.id, prompt.messages[-1]["content"], prompt.answer) == (prompt_id, last, answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 3 = 15\nAnswer: 15", "15"),
        ("Answer: **1,234** rolls", "1234"),
        ("so 7 and then 8.", "8"),
        ("Answer: -3.5 degrees", "-3.5"),
        ("Answer: 41.0", "41"),
        ("none", None),
    ],
)
def test_final_numbers(text, number):
    assert final_number(text) == number
