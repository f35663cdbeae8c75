"""An action that is written as text is read back, and a text that is not an action is rejected."""

import random

import pytest

from symm_overlap.pipeline.action import (
    BACKWARDS,
    DIALECTS,
    FORWARD,
    KINDS,
    OVERLAP_F_B,
    WHOLE_STAGE,
    Action,
    compound_of,
)


def some_action(random, compound=True):
    """Return a random action of any kind."""
    kind = random.choice(sorted(KINDS if compound else KINDS - {OVERLAP_F_B}))
    if kind == OVERLAP_F_B:
        parts = [Action(random.randrange(12), each, random.randrange(30)) for each in (FORWARD, random.choice("BI"))]
        random.shuffle(parts)
        return compound_of(*parts)
    return Action(random.randrange(200), kind, None if kind in WHOLE_STAGE else random.randrange(1000))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_written_is_read_back(dialect):
    source = random.Random(0)
    for _ in range(2000):
        action = some_action(source)
        assert Action.parse(action.text(dialect), dialect) == action


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1F0", Action(1, "F", 0)),
        (" 2I1\t", Action(2, "I", 1)),
        ("10W23", Action(10, "W", 23)),
        ("0B3", Action(0, "B", 3)),
        ("1UNSHARD", Action(1, "UNSHARD", None)),
        ("3RESHARD", Action(3, "RESHARD", None)),
        ("3REDUCE_GRAD", Action(3, "REDUCE_GRAD", None)),
        ("3WAIT_REDUCE_GRAD", Action(3, "WAIT_REDUCE_GRAD", None)),
        ("2SEND_B2", Action(2, "SEND_B", 2)),
        ("1RECV_F1", Action(1, "RECV_F", 1)),
        ("1WAIT_SEND_F1", Action(1, "WAIT_SEND_F", 1)),
        ("(0F7;7B3)OVERLAP_F_B", Action(-1, "OVERLAP_F_B", None, (Action(0, "F", 7), Action(7, "B", 3)))),
        ("(7I3; 0F7)OVERLAP_F_B", Action(-1, "OVERLAP_F_B", None, (Action(7, "I", 3), Action(0, "F", 7)))),
    ],
)
def test_texts_of_torch(text, expected):
    assert Action.parse(text) == expected
    assert str(expected) == text.strip().replace("; ", ";")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "3BW1",
            r"'3BW1' is not an action in the dialect 'torch'.*such as 1F0.* one in the dialect 'zero-b",
        ),
        ("", "'' is not an action"),
        ("F0", "expected a stage, a kind and a microbatch"),
        ("1F", "F needs a microbatch, such as 1F0"),
        ("1F0 2F0", "is not an action"),
        ("1F0x", "is not an action"),
        ("1f0", "is not an action"),
        ("-1F0", "is not an action"),
        ("1UNSHARD2", "UNSHARD concerns a whole stage, so write 1UNSHARD"),
        ("1 F0", "is not an action"),
        ("\u0663F1", "is not an action"),
        ("9" * 5000 + "F1", r"'9{57}\.\.\.' is not an action.*at most nine digits"),
        ("(0F1)OVERLAP_F_B", "has two parts, a forward and a backward, such as"),
        ("(0F1;1F1)OVERLAP_F_B", "has two parts"),
        ("(0F1;1W1)OVERLAP_F_B", "has two parts"),
        ("(0F1;1B1;2B1)OVERLAP_F_B", "has two parts"),
        ("((0F1;1B1)OVERLAP_F_B;2B1)OVERLAP_F_B", "is not an action"),
        ("(0F1;1B1)F", "is not an action"),
        ("(0F1;1B1)OVERLAP_F_B0", "is not an action"),
        ("0OVERLAP_F_B1", "is not an action"),
    ],
)
def test_what_is_no_action_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Action.parse(text)


def test_the_older_dialect_calls_the_gradient_of_the_input_b():
    assert Action.parse("1B0", "zero-bubble") == Action(1, "I", 0)
    assert Action.parse("1BW0", "zero-bubble") == Action(1, "B", 0)
    assert Action.parse("(0F1;1BW1)OVERLAP_F_B", "zero-bubble").text() == "(0F1;1B1)OVERLAP_F_B"
    with pytest.raises(ValueError, match=r"kinds are B, BW, F.* It is one in the dialect 'torch'"):
        Action.parse("1I0", "zero-bubble")


def test_an_unknown_dialect_is_refused():
    for call in (lambda: Action.parse("1F0", "french"), lambda: Action(1, "F", 0).text("french")):
        with pytest.raises(ValueError, match="there is no dialect 'french' of schedules: it is one of 'torch'"):
            call()


def test_every_text_is_read_as_it_is_written_or_refused():
    """Parse random texts that resemble actions. An action that is accepted must be read back from its own text."""
    source = random.Random(1)
    pieces = [*"FIWB0123();", "SEND_F", "RECV_B", "UNSHARD", "OVERLAP_F_B", "WAIT_", "1F0", "2B1", " ", "x", "-"]
    accepted = 0
    for _ in range(20000):
        text = "".join(source.choices(pieces, k=source.randint(1, 6)))
        try:
            action = Action.parse(text)
        except ValueError:
            continue
        accepted += 1
        assert Action.parse(str(action)) == action
        assert {leaf.kind for leaf in action.leaves} <= KINDS - {OVERLAP_F_B}
        assert all(int(number) < 10**9 for number in [action.microbatch or 0])
    assert accepted > 500


def test_leaves_of_a_compound_are_its_parts():
    forward, backward = Action(0, "F", 1), Action(3, "B", 0)
    assert compound_of(forward, backward).leaves == (forward, backward)
    assert forward.leaves == (forward,)
    assert backward.kind in BACKWARDS
