"""The commands on a checkpoint of a vision-language model, saved with its processor."""

import json
import shutil

import pytest
from tiny import save_checkpoint
from tiny_vision import picture, tiny_vision_model

from cb_rollout import ConfigurationError, RolloutGenerator, SamplingParams
from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
from cb_rollout.tools.dataset import generate_dataset
from cb_rollout.tools.doctor import Level, checkpoint_findings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model, processor = tiny_vision_model("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def chat(part):
    content = [{"type": "text", "text": "w60"}, part, {"type": "text", "text": "w61"}]
    return [{"role": "user", "content": content}]


def test_rows_name_their_pictures_by_paths_beside_the_file(checkpoint, tmp_path):
    (tmp_path / "pictures").mkdir()
    for seed in (1, 2):
        picture(seed).save(tmp_path / "pictures" / f"{seed}.png")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    named = {"type": "image", "image": "pictures/1.png"}
    rows = [
        {"id": "chat", "messages": chat(named)},
        {
            "id": "openai",
            "messages": chat({"type": "image_url", "image_url": {"url": "pictures/2.png"}}),
        },
        {"id": "text", "prompt": "w60 <image> w61", "images": ["pictures/1.png"]},
        {"id": "broken", "prompt": "w60 <image>", "images": ["pictures/broken.png"]},
        {"id": "missing", "prompt": "w60 <image>", "images": ["pictures/3.png"]},
        {"id": "remote", "prompt": "w60 <image>", "images": ["https://x.org/a.png"]},
        {"id": "plain", "prompt": "w60 w61"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = generate_dataset(
        checkpoint,
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        progress_bar=False,
        temperature=0.0,
        max_new_tokens=4,
    )
    assert report.num_failed == 3
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    results = {result["id"]: result for result in map(json.loads, lines)}
    assert results["broken"]["error"].startswith(
        f"{tmp_path / 'in.jsonl'} line 4: image 0 cannot be read"
    )
    assert "line 5: image 0 cannot be read" in results["missing"]["error"]
    assert "line 6: image 0 is a URL" in results["remote"]["error"]
    prompts = [
        chat({"type": "image", "image": picture(1)}),
        chat({"type": "image", "image": picture(2)}),
        {"prompt": "w60 <image> w61", "images": [picture(1)]},
        "w60 w61",
    ]
    with RolloutGenerator(
        load_model(checkpoint), tokenizer=load_tokenizer(checkpoint)
    ) as generator:
        greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
        outputs = generator.generate_batch(prompts, sampling_params=greedy)
    for name, output in zip(("chat", "openai", "text", "plain"), outputs.values(), strict=True):
        assert results[name]["token_ids"] == output.generated_tokens


def test_pictures_for_a_model_of_text_become_errors(tmp_path):
    picture(1).save(tmp_path / "a.png")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "images": ["a.png"]}))
    text_model = save_checkpoint(tmp_path)
    report = generate_dataset(str(text_model), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert report.num_failed == report.num_sequences == 1
    assert f"{tmp_path / 'in.jsonl'} line 1: " in report.first_error
    assert "processor" in report.first_error


def images_finding(name):
    return next(found for found in checkpoint_findings(name) if found.name == "images")


def test_the_doctor_says_whether_images_run_and_why_not(checkpoint, tmp_path, monkeypatch):
    found = images_finding(checkpoint)
    assert found.level is Level.OK
    assert found.text.startswith("run: 16 tokens, ")
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    for file in ("processor_config.json", "preprocessor_config.json"):
        (bare / file).unlink(missing_ok=True)
    found = images_finding(str(bare))
    assert found.level is Level.WARNING
    assert found.text.startswith("are refused: ")
    assert "processor" in found.text
    assert images_finding(str(save_checkpoint(tmp_path / "text"))).text == "not read by this model"


def test_a_picture_that_changed_is_refused_and_one_that_was_missing_is_taken(checkpoint, tmp_path):
    images = ["1.png", "2.png"]
    rows = [{"id": name, "prompt": "w60 <image>", "images": [name]} for name in images]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    picture(1).save(tmp_path / "1.png")

    def generate():
        paths = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        return generate_dataset(checkpoint, *paths, progress_bar=False, max_new_tokens=4)

    assert generate().num_failed == 1
    picture(2).save(tmp_path / "2.png")
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(line for line in lines if "error" not in line))
    assert (report := generate()).num_failed == 0
    assert (report.num_resumed, report.num_sequences) == (1, 2)
    picture(3).save(tmp_path / "2.png")
    with pytest.raises(ConfigurationError, match=r"pictures\.2\.png was '"):
        generate()
