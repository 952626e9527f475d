"""Bad inputs are refused before anything is loaded, with file and line."""

import datetime
import json
import re

import pytest
from datasets import Dataset

from cb_rollout import ConfigurationError, InvalidRequestError
from cb_rollout.tools.dataset.rows import create_source, rows, survey


def surveyed(path, text):
    path.write_text(text)
    return survey(create_source(str(path)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{prompt}", "is not JSON"),
        ('{"prompt": "cut o', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", "is not an object but a list"),
        ('{"id": 3}', "has neither prompt nor messages"),
        ('{"prompt": null}', "has neither prompt nor messages"),
        ('{"prompt": "a", "messages": []}', "has both prompt and messages"),
        ('{"prompt": ""}', "has an empty prompt"),
        ('{"prompt": 3}', "has no text as prompt"),
        ('{"prompt": [1, "a"]}', "in which 1 is not a message"),
        ('{"messages": "hi"}', "has messages that are not a list"),
        ('{"messages": []}', "has an empty list as messages"),
        ('{"messages": [{"role": "user"}]}', "is not a message with role and content"),
        ('{"prompt": "a", "id": 1.5}', "has the id 1.5, which is neither text nor a whole number"),
        ('{"prompt": "a", "id": true}', "has the id True"),
        ('{"prompt": "a", "completion": "b"}', "has the key 'completion', which results use"),
        ('{"prompt": "a", "x": NaN}', "holds what JSON cannot"),
        ('{"prompt": "a", "images": "a.png"}', "has images that are not a list"),
        ('{"prompt": "a", "images": [3]}', "has the image 3, which is not a path"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, line, said):
    path = tmp_path / "in.jsonl"
    with pytest.raises(InvalidRequestError) as caught:
        surveyed(path, f'{{"prompt": "good"}}\n\n{line}\n')
    assert str(caught.value).startswith(f"{path} line 3 ")
    assert said in str(caught.value)


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe\x00"}\n')
    with pytest.raises(InvalidRequestError, match=r"in.jsonl line 1 is not JSON"):
        survey(create_source(str(path)))


def test_a_duplicate_id_is_refused_with_both_lines(tmp_path):
    text = '{"prompt": "a", "id": "x"}\n{"prompt": "b"}\n{"prompt": "c", "id": "x"}\n'
    path = tmp_path / "in.jsonl"
    with pytest.raises(
        InvalidRequestError, match=rf"{path} line 3 has the id 'x' of {path} line 1"
    ):
        surveyed(path, text)
    with pytest.raises(InvalidRequestError, match=r"line 2 has the id 1 of .*line 1"):
        surveyed(path, '{"prompt": "a", "id": 1}\n{"prompt": "b"}\n')


def test_an_input_without_rows_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="no rows"):
        surveyed(tmp_path / "in.jsonl", "\n\n")


def test_the_digest_depends_on_the_rows_and_their_order(tmp_path):
    path = tmp_path / "in.jsonl"
    first = surveyed(path, '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 2}\n')
    assert first == surveyed(path, '{"prompt":"a","id":1}\r\n{"prompt":"b",  "id":2}')
    others = [
        '{"prompt": "b", "id": 2}\n{"prompt": "a", "id": 1}\n',
        '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 3}\n',
        '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 2, "x": 0}\n',
    ]
    assert len({first[1], *(surveyed(path, text)[1] for text in others)}) == 4


def test_empty_columns_are_dropped(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    table = [{"prompt": "a", "messages": None}, {"prompt": None, "messages": chat}]
    Dataset.from_list(table).to_parquet(tmp_path / "in.parquet")
    source = create_source(str(tmp_path / "in.parquet"))
    assert survey(source)[0] == 2
    assert [row.values for row in rows(source)] == [{"prompt": "a"}, {"messages": chat}]


def test_a_value_that_json_cannot_hold_is_named(tmp_path):
    table = [{"prompt": "a", "when": datetime.datetime(2026, 1, 1)}]
    Dataset.from_list(table).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(InvalidRequestError, match=r"row 0 holds what JSON cannot .*datetime"):
        survey(create_source(str(tmp_path / "in.parquet")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.jsonl", "does not exist"),
        ("missing.parquet", "does not exist"),
        ("directory.jsonl", "is not a file"),
        ("x" * 300 + ".jsonl", "cannot be read (File name too long)"),
        ("notes.txt", "ends in none of .jsonl"),
        ("garbage.parquet", "is not a Parquet file"),
        ("empty", "cannot be loaded"),
        ("saved", "split 'train' of"),
    ],
)
def test_an_input_that_cannot_be_read_is_a_typed_error(tmp_path, name, said):
    (tmp_path / "directory.jsonl").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "garbage.parquet").write_text("hello")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text(json.dumps({}))
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        create_source(str(tmp_path / name))


def test_a_table_that_is_damaged_after_its_start_is_a_typed_error(tmp_path):
    path = tmp_path / "in.parquet"
    Dataset.from_list([{"prompt": f"prompt {n}" * 9} for n in range(4000)]).to_parquet(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(2000) + whole[middle + 2000 :])
    source = create_source(str(path))
    for read in (survey, lambda source: list(rows(source))):
        with pytest.raises(ConfigurationError, match=r"in.parquet cannot be read after row \d+ "):
            read(source)
