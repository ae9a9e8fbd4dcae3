"""What people see of an inspected sample: colours tell objects and tokens apart; answers cannot steer the terminal."""

import io

import pytest
from rich.console import Console

from stage2_report.inspection import Inspection, answer_text, supervision_table, supervision_text, token_supervision
from tests.unit.cli.inspected import ANSWERS, GARBAGE, TRUNCATED, target_of, tiny_spelling


def inspection(answer):
    return Inspection("scene", "a test", target_of(answer), tiny_spelling().vocab, None)


def styled(text, style):
    """The parts of a rich text with this style."""
    return [text.plain[span.start : span.end] for span in text.spans if span.style == style]


def test_each_object_has_the_colour_of_what_became_of_it():
    text = answer_text(target_of(TRUNCATED))
    assert [part[:10] for part in styled(text, "green")] == ['"object_1"']
    assert [part[:10] for part in styled(text, "yellow")] == ['"object_2"']
    assert [part[:10] for part in styled(text, "red")] == ['"object_3"', '"object_4"']
    assert styled(text, "dim strike") == [', "object_4": {"desc": "gre']
    assert "".join(styled(text, "bold cyan")) == target_of(TRUNCATED).append_text


def test_an_answer_without_json_is_struck_out_before_the_tail():
    text = answer_text(target_of(GARBAGE))
    assert styled(text, "dim strike") == [GARBAGE]
    assert text.plain.startswith(GARBAGE + '\n{"object_1": ')


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_every_token_is_shown_with_its_label(answer):
    one = inspection(answer)
    supervised = token_supervision(one.target, one.vocab)
    text = supervision_text(one, supervised)
    assert len(styled(text, "bold magenta")) == supervised.labels.count("coord")
    assert "".join(styled(text, "green")) == "".join(
        one.vocab.decode([token])
        for token, label in zip(one.target.y_train_ids, supervised.labels, strict=True)
        if label == "ce"
    )


def test_without_colours_each_run_of_tokens_is_a_row():
    one = inspection(TRUNCATED)
    supervised = token_supervision(one.target, one.vocab)
    table = supervision_table(one, supervised)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert "<|coord_110|>→100" in console.file.getvalue()
    changes = sum(a != b for a, b in zip(supervised.labels, supervised.labels[1:], strict=False))
    assert table.row_count == changes + 1


def test_control_characters_are_shown_and_not_obeyed():
    answer = '{"object_1": {"desc": "\x1b[2J\x07", "bbox_2d": []}'
    one = inspection(answer)
    shown = [answer_text(one.target), supervision_text(one, token_supervision(one.target, one.vocab))]
    assert all("␛[2J␇" in text.plain and "\x1b" not in text.plain for text in shown)
