"""A prompt with images has the log-probabilities of a plain forward with the same images."""

import copy
import math
from functools import cache, wraps

import numpy as np
import pytest
import torch
from fast_path import Playback, pretend_cuda
from PIL import Image
from tiny import tiny_model
from tiny_vision import (
    BUILDERS,
    picture,
    plain_logits,
    plain_logprobs,
    tiny_vision_model,
    word_tokenizer,
)

from cb_rollout import (
    ConfigurationError,
    InvalidRequestError,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
    generate_batch,
    packed_logprobs,
)
from cb_rollout.packing import logprobs as logprobs_module
from cb_rollout.packing.batch import PackingLayout
from cb_rollout.packing.logprobs import _LAYOUTS
from cb_rollout.strategies import GroupCollector, RequestStream

TYPES = tuple(BUILDERS)
MROPE = "qwen2_5_vl"
TOLERANCE = 1e-5
HAS_GPU = torch.cuda.is_available()
QUESTION = {"type": "text", "text": "w40 w41 w42 w43 w44 w45"}

made = cache(tiny_vision_model)


# All images of a prompt are computed in one forward: in Gemma 3 the tokens of an image see each
# other, and Idefics3's tensors do not divide into images, so they count as one.
COMPUTED_TOGETHER = ("gemma3", "idefics3")
ENCODED_TOGETHER = ("idefics3",)


def each_type(*core, failing=None):
    """Every type, of which only these run with the fast tests; `failing`: why others fail yet."""
    marks = {name: [] if name in core else [pytest.mark.slow] for name in TYPES}
    for name, reason in (failing or {}).items():
        marks[name].append(pytest.mark.xfail(strict=True, reason=reason))
    return pytest.mark.parametrize("model_type", [pytest.param(t, marks=marks[t]) for t in TYPES])


def chat(*pictures):
    images = [{"type": "image", "image": image} for image in pictures]
    return [{"role": "w30", "content": [*images, QUESTION]}]


def processed(processor, messages):
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def greedy(num_tokens=8):
    return SamplingParams(do_sample=False, max_new_tokens=num_tokens, ignore_eos=True)


def sampled(num_tokens=8, **settings):
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **settings)


def generator_of(model_type, **settings):
    model, processor = made(model_type)
    config = RolloutConfig(**{"seed": 0, "block_size": 4, "num_blocks": 64} | settings)
    return RolloutGenerator(model, config, tokenizer=processor)


def rollout(generator, inputs, params, **settings):
    return list(generator.generate_batch(inputs, sampling_params=params, **settings).values())


def assert_plain(model, output, tensors=None):
    """Its log-probabilities are those of a plain forward with these tensors of a processor."""
    tensors = tensors or {"input_ids": torch.tensor([output.prompt_ids])}
    assert output.prompt_ids == tensors["input_ids"][0].tolist()
    expected = plain_logprobs(model, tensors, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)


def num_prefilled(generator):
    return generator.manager.counters.prefill_tokens


@pytest.mark.fast_cases("llava")
@each_type(*TYPES)
def test_groups_with_images_beside_text_agree_with_plain_forwards(model_type):
    model, processor = made(model_type)
    chats = [chat(picture(1)), chat(picture(2, (64, 24)), picture(3)), chat()]
    with generator_of(model_type) as generator:
        outputs = rollout(generator, [*chats, [20, 21, 22]], sampled(), num_return_sequences=3)
        assert generator.manager.engine.num_blocks_used == 0
        assert generator.verify(12).max <= TOLERANCE
    for output, messages in zip(outputs, [c for c in chats for _ in range(3)], strict=False):
        assert_plain(model, output, processed(processor, messages))
    for output in outputs[-3:]:
        assert_plain(model, output)


@pytest.mark.fast_cases("llava")
@each_type(*TYPES)
def test_greedy_tokens_are_those_of_generate(model_type):
    model, processor = made(model_type)
    messages = chat(picture(5), picture(6))
    expected = model.generate(
        **processed(processor, messages), max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    with generator_of(model_type) as generator:
        (output,) = rollout(generator, [messages], greedy())
    assert output.prompt_ids + output.generated_tokens == expected[0].tolist()


@pytest.mark.fast_cases("qwen2_5_vl")
@pytest.mark.parametrize("model_type", [MROPE, "gemma3"])
def test_preempted_sequences_and_new_weights_read_nothing_old(model_type):
    model, processor = made(model_type)
    model = copy.deepcopy(model)
    config = RolloutConfig(seed=0, block_size=4, num_blocks=14)
    chats = [chat(picture(seed)) for seed in (1, 2, 3)]
    with RolloutGenerator(model, config, tokenizer=processor) as generator:
        engine = generator.manager.engine
        requests = []
        for messages in chats:
            tensors = processed(processor, messages)
            row = {"prompt": tensors["input_ids"][0].tolist(), "images": [picture_of(messages)]}
            requests += generator.manager.create_requests([row], [sampled(12)], members=range(2))
        for request in requests:
            engine.add(request)
        while not all(request.num_generated >= 2 for request in requests[:2]):
            engine.step()
        before = copy.deepcopy(model)
        starts = [request.num_generated for request in requests]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        engine.begin_policy_version(1)
        while engine.has_work:
            engine.step()
        assert engine.counters.preemptions > 0
        assert engine.num_blocks_used == 0
    for number, (request, start) in enumerate(zip(requests, starts, strict=True)):
        tensors = processed(processor, chats[number // 2])
        tokens = request.token_ids[len(request.prompt_ids) :]
        old, new = (plain_logprobs(one, tensors, tokens) for one in (before, model))
        assert request.logprobs == pytest.approx(old[:start] + new[start:], abs=TOLERANCE)


def picture_of(messages):
    return messages[0]["content"][0]["image"]


@each_type(MROPE, "gemma3")
def test_a_prompt_is_chunked_after_its_last_image(model_type):
    model, processor = made(model_type)
    long = {"type": "text", "text": " ".join(f"w{i}" for i in range(60, 90))}
    messages = [{"role": "w30", "content": [*chat(picture(1))[0]["content"], long]}]
    with generator_of(model_type, max_batch_tokens=16) as generator:
        generator.generate_batch([chat(picture(9))], sampling_params=greedy(1))
        before = generator.manager.counters.prefill_forwards
        (output,) = rollout(generator, [messages], sampled())
        assert generator.manager.counters.prefill_forwards >= before + 3
    assert_plain(model, output, processed(processor, messages))


@each_type(MROPE, "idefics3")
def test_other_pictures_share_nothing_and_the_same_picture_everything(model_type):
    model, processor = made(model_type)
    first, second = chat(picture(1)), chat(picture(2))
    with generator_of(model_type) as generator:
        (one,) = rollout(generator, [first], sampled())
        num_before = num_prefilled(generator)
        (two,) = rollout(generator, [second], sampled())
        # The words before a picture are the same.
        assert num_prefilled(generator) - num_before >= len(one.prompt_ids) - 4
        num_before = num_prefilled(generator)
        (again,) = rollout(generator, [first], sampled())
        assert num_prefilled(generator) - num_before <= generator.config.block_size
    assert one.prompt_ids == two.prompt_ids
    for output, messages in ((one, first), (two, second), (again, first)):
        assert_plain(model, output, processed(processor, messages))


@pytest.mark.fast_cases("qwen2_5_vl")
@each_type(MROPE, "gemma3")
def test_a_later_turn_about_a_picture_computes_its_own_tokens_alone(model_type):
    model, processor = made(model_type)
    messages = chat(picture(1))
    with generator_of(model_type) as generator:
        (first,) = rollout(generator, [messages], sampled())
        turn = [*first.prompt_ids, *first.generated_tokens, 70, 71, 72]
        # A generator of later turns knows the pictures from their pixels.
        row = {"prompt": turn, "images": [picture(1)]}
        num_before = num_prefilled(generator)
        (second,) = rollout(generator, [row], sampled())
        assert num_prefilled(generator) - num_before < 3 + 2 * generator.config.block_size
        changed = {"prompt": turn, "images": [picture(4)]}
        (third,) = rollout(generator, [changed], sampled())
        more = {"prompt": turn[:-3] + turn, "images": [picture(1), picture(4)]}
        (fourth,) = rollout(generator, [more], sampled())
    cases = ((second, row), (third, changed), (fourth, more))
    for output, given in cases:
        assert_plain(model, output, of_ids(processor, given))


@each_type(MROPE)
def test_a_later_turn_that_adds_a_picture_computes_what_is_new_alone(model_type):
    model, processor = made(model_type)
    with generator_of(model_type) as generator:
        # The first prompt with several pictures is checked beside.
        rollout(generator, [chat(picture(8), picture(9))], greedy(1))
        (first,) = rollout(generator, [chat(picture(1))], sampled())
        turn = [*first.prompt_ids, *first.generated_tokens]
        row = {"prompt": turn + first.prompt_ids, "images": [picture(1), picture(4)]}
        num_before = num_prefilled(generator)
        num_encoded = generator.manager.counters.images_encoded
        (second,) = rollout(generator, [row], sampled())
        num_new = num_prefilled(generator) - num_before
        if model_type in COMPUTED_TOGETHER:
            assert num_new == len(row["prompt"])
        else:
            assert num_new <= len(first.prompt_ids) + 2 * generator.config.block_size
        # Images that do not divide are counted as one.
        is_whole = model_type in COMPUTED_TOGETHER and model_type not in ENCODED_TOGETHER
        assert generator.manager.counters.images_encoded == num_encoded + 1 + is_whole
        # Of a turn that ends within the second picture nothing of that picture is taken.
        third = row | {"images": [picture(1), picture(5)]}
        num_before = num_prefilled(generator)
        (third_output,) = rollout(generator, [third], sampled())
        if model_type not in COMPUTED_TOGETHER:
            assert num_prefilled(generator) - num_before < len(row["prompt"])
    assert_plain(model, second, of_ids(processor, row))
    assert_plain(model, third_output, of_ids(processor, third))


@pytest.mark.fast_cases("qwen2_5_vl")
@each_type(MROPE, "gemma3")
def test_a_group_encodes_its_pictures_once_under_each_policy(model_type):
    model, processor = made(model_type)
    model = copy.deepcopy(model)
    config = RolloutConfig(seed=0, block_size=4, num_blocks=64)
    calls = encoder_calls(model)
    chats = [chat(picture(1)), chat(picture(2), picture(3))]
    num_pictures = 2 if model_type in ENCODED_TOGETHER else 3
    with RolloutGenerator(model, config, tokenizer=processor) as generator:
        # The first prompts of each kind are computed by plain forwards too.
        rollout(generator, [chat(picture(8)), chat(picture(8), picture(9))], greedy(1))
        for version in range(2):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
                generator.sync_weights()
            calls.clear()
            num_encoded = generator.manager.counters.images_encoded
            outputs = rollout(generator, chats, sampled(), num_return_sequences=3)
            assert generator.manager.counters.images_encoded == num_encoded + num_pictures
            assert len(calls) == len(chats)
            for output, messages in zip(outputs, [c for c in chats for _ in range(3)], strict=True):
                assert_plain(model, output, processed(processor, messages))


@pytest.mark.fast_cases("qwen2_5_vl")
@each_type(MROPE, "gemma3")
def test_each_prompt_with_images_has_a_prefill_of_its_own(model_type):
    model, processor = made(model_type)
    chats = [chat(picture(seed)) for seed in (1, 2)] + [chat(picture(4), picture(5))]
    with generator_of(model_type, num_blocks=512) as generator:
        # The first prompts of each kind are computed by plain forwards too.
        rollout(generator, [chat(picture(8)), chat(picture(8), picture(9))], greedy(1))
        counters = generator.manager.counters
        num_before = counters.prefill_forwards
        outputs = rollout(generator, [*chats, [20, 21, 22]], sampled(), num_return_sequences=2)
        assert counters.prefill_forwards - num_before == len(chats) + 1
    for output, messages in zip(outputs, [c for c in chats for _ in range(2)], strict=False):
        assert_plain(model, output, processed(processor, messages))
    for output in outputs[-2:]:
        assert_plain(model, output)


def test_a_prompt_whose_images_fail_leaves_its_neighbours(monkeypatch):
    model, processor = made("llava")
    chats = [chat(picture(seed)) for seed in (1, 2, 3)]
    pixels = processed(processor, chats[1])["pixel_values"]
    own = type(model.model).get_image_features

    def failing(self, pixel_values, *others, **named):
        if any(torch.equal(one, pixels[0]) for one in pixel_values):
            raise ValueError("a broken picture")
        return own(self, pixel_values, *others, **named)

    with generator_of("llava") as generator:
        rollout(generator, [chat(picture(8))], greedy(1))
        monkeypatch.setattr(type(model.model), "get_image_features", failing)
        outputs = rollout(generator, chats, sampled(), on_error="return")
    monkeypatch.undo()
    assert [output.status.value for output in outputs] == ["finished", "failed", "finished"]
    assert "a broken picture" in outputs[1].error
    for number in (0, 2):
        assert_plain(model, outputs[number], processed(processor, chats[number]))


def encoder_calls(model):
    """The calls of a model's own vision tower, from now on."""
    calls = []
    tower = next(
        m
        for name, m in model.named_modules()
        if name.endswith(("visual", "vision_tower", "vision_model"))
    )
    tower.register_forward_hook(lambda *_: calls.append(1))
    return calls


def of_ids(processor, row):
    """The processor's tensors, with these token ids in the place of its own."""
    pictures = row["images"]
    text = " ".join([processor.image_token] * len(pictures))
    tensors = dict(processor(text=[text], images=[pictures], return_tensors="pt"))
    tensors.pop("attention_mask")
    tensors["input_ids"] = torch.tensor([row["prompt"]])
    for name in tensors:
        if name.endswith("token_type_ids"):
            tensors[name] = torch.tensor(processor.create_mm_token_type_ids([row["prompt"]]))
    return tensors


@each_type(MROPE, "idefics3")
def test_a_row_of_text_or_of_token_ids_is_the_prompt_that_the_processor_makes(model_type):
    _, processor = made(model_type)
    text = f"w30 w51 {processor.image_token} w52 {QUESTION['text']} w50"
    token_ids = processed(processor, chat(picture(1)))["input_ids"][0].tolist()
    rows = [{"prompt": prompt, "images": [picture(1)]} for prompt in (text, token_ids)]
    filled = [{"role": "w30", "content": [{"type": "image"}, QUESTION]}]
    rows.append({"prompt": filled, "images": [picture(1)]})
    with generator_of(model_type) as generator:
        outputs = rollout(generator, [chat(picture(1)), *rows], greedy())
        # Equal prompts are one group.
        assert num_prefilled(generator) == len(token_ids)
    assert all(output.prompt_ids == token_ids for output in outputs)
    assert len({tuple(output.generated_tokens) for output in outputs}) == 1


def test_the_manager_and_the_one_call_function_take_images():
    model, processor = made("llava")
    row = {"prompt": "w30 <image> w40", "images": [picture(1)]}
    with generator_of("llava") as generator:
        (expected,) = rollout(generator, [row], greedy())
        manager = generator.manager
        request_id = manager.add_request(row, max_new_tokens=8, sampling_params=greedy())
        result = manager.get_result(request_id, timeout=60)
        (other,) = manager.add_requests([row], max_new_tokens=8, sampling_params=greedy())
        assert manager.get_result(other, timeout=60).generated_tokens == expected.generated_tokens
    assert result.generated_tokens == expected.generated_tokens
    (output,) = generate_batch(
        model,
        [row],
        continuous_batching_config=RolloutConfig(seed=0),
        tokenizer=processor,
        sampling_params=greedy(),
        progress_bar=False,
    ).values()
    assert output.generated_tokens == expected.generated_tokens


def test_positions_after_an_image_are_neither_left_on_the_model_nor_read_from_it():
    model, processor = made(MROPE)
    messages = chat(picture(1))
    tensors = processed(processor, messages)
    assert (
        len(
            set(
                model.model.get_rope_index(
                    **{
                        name: tensors[name]
                        for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")
                    }
                )[1]
                .flatten()
                .tolist()
            )
            | {0}
        )
        == 2
    ), "the picture takes as many positions as tokens"
    with generator_of(MROPE) as generator:
        stale = model.model.rope_deltas = torch.full((2, 1), 7)
        outputs = rollout(generator, [messages, [20, 21, 22]], sampled(), num_return_sequences=2)
        assert generator.verify(4).max <= TOLERANCE
        assert model.model.rope_deltas is stale
    model.model.rope_deltas = None
    for output in outputs[:2]:
        assert_plain(model, output, tensors)


def test_an_image_is_not_checked_by_weights_that_were_released():
    model, processor = made(MROPE)
    row = {"prompt": "w30 <image> w31", "images": [picture(1)]}
    with generator_of(MROPE, weight_sync="copy") as generator:
        generator.sleep(level=2)
        with pytest.raises(RolloutError, match=r"call sync_weights\(\) first"):
            rollout(generator, [row], sampled())
        generator.sync_weights()
        (output,) = rollout(generator, [row], sampled())
    assert_plain(model, output, of_ids(processor, row | {"prompt": output.prompt_ids}))


def test_a_prompt_may_end_in_an_image():
    model, processor = made(MROPE)
    row = {"prompt": "w30 w31 <image>", "images": [picture(1)]}
    with generator_of(MROPE) as generator:
        (output,) = rollout(generator, [row], sampled())
    assert_plain(model, output, of_ids(processor, row | {"prompt": output.prompt_ids}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "use_cuda_graph", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True)]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a pretended device")
def test_rows_with_their_own_positions_share_a_step_on_pages_and_in_graphs(
    use_cuda_graph, monkeypatch
):
    pytest.importorskip("triton")
    model, processor = made(MROPE)
    pretend_cuda(monkeypatch)
    settings = {"use_cuda_graph": use_cuda_graph}
    with generator_of(MROPE, **settings) as generator:
        assert "triton" in generator.manager.decode_path
        outputs = rollout(generator, [chat(picture(1)), [20, 21, 22]], sampled(2))
    assert bool(Playback.num_captures) is use_cuda_graph
    assert_plain(model, outputs[0], processed(processor, chat(picture(1))))
    assert_plain(model, outputs[1])


def test_rows_with_their_own_positions_share_a_gathered_step(monkeypatch):
    model, processor = made(MROPE)
    monkeypatch.setattr("cb_rollout.engine.attention.selector.BACKENDS", [])
    with generator_of(MROPE) as generator:
        outputs = rollout(generator, [chat(picture(1)), [20, 21, 22]], sampled())
    assert_plain(model, outputs[0], processed(processor, chat(picture(1))))
    assert_plain(model, outputs[1])


def model_of_placeholders():
    """A model that would sample little else than placeholders of images."""
    model, processor = made("llava")
    model = copy.deepcopy(model)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.weight.shape[0]))
    with torch.no_grad():
        model.lm_head.bias[processor.image_token_id] = 9.0
    return model, processor


IN_GRAPHS = (pytest.mark.slow, pytest.mark.skipif(HAS_GPU, reason="a GPU has graphs of its own"))


@pytest.mark.parametrize("path", ["kernels", pytest.param("graphs", marks=IN_GRAPHS)])
@pytest.mark.parametrize("mode", ["policy", "processed"])
def test_a_placeholder_is_sampled_only_where_the_caller_names_it(mode, path, monkeypatch):
    """With and without an image in the prompt; of "graphs" the rows that name none stay in one."""
    model, processor = model_of_placeholders()
    image_id = processor.image_token_id
    asking = sampled(logit_bias={image_id: 0.5})
    # As TRL 1.16 forbids the image token.
    forbidding = sampled(logit_bias={image_id: -math.inf})
    settings = {"logprobs_mode": mode, "block_size": 4}
    if path == "graphs":
        pytest.importorskip("triton")
        pretend_cuda(monkeypatch)
        settings["use_cuda_graph"] = True
    config = RolloutConfig(seed=0, max_requests_per_batch=4, **settings)
    with RolloutGenerator(model, config, tokenizer=processor) as generator:
        text = [20, 21, 22]
        outputs = rollout(generator, [chat(picture(1)), text], [sampled(), forbidding])
        asked = rollout(generator, [chat(picture(1)), text], [sampled(), asking])
    found = [image_id in output.generated_tokens for output in (*outputs, *asked)]
    assert found == [False, False, False, True]
    tensors = processed(processor, chat(picture(1))), {"input_ids": torch.tensor([text])}
    for output, given in zip(outputs, tensors, strict=True):
        logprobs_NV = plain_logits(model, given, output.generated_tokens).log_softmax(-1)
        if mode == "processed":
            logprobs_NV[:, image_id] = -torch.inf
            logprobs_NV = logprobs_NV.log_softmax(-1)
        tokens_N1 = torch.tensor(output.generated_tokens)[:, None]
        expected = logprobs_NV.gather(1, tokens_N1)[:, 0].tolist()
        assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)


MODES = ("RGBA", "P", "L", "LA", "1", "CMYK")


@each_type("llava")
def test_a_picture_of_any_mode_works(model_type, tmp_path):
    pictures = [picture(1).convert(mode) for mode in MODES]
    path = tmp_path / "animated.gif"
    frames = [picture(seed).convert("P") for seed in (1, 2)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    pictures += [path, str(path)]
    with generator_of(model_type) as generator, Image.open(path) as opened:
        pictures.append(opened)
        outputs = rollout(generator, [chat(image) for image in pictures], greedy(2))
        assert generator.verify(len(outputs)).max <= TOLERANCE


def broken(tmp_path):
    path = tmp_path / "broken.png"
    picture(1).save(path)
    path.write_bytes(path.read_bytes()[:200])
    return path


ROW = {"prompt": "w30 <image> w40", "images": [picture(1)]}
VIDEO = [{"role": "w30", "content": [{"type": "video", "video": "x.mp4"}]}]
BARE = [{"role": "w30", "content": [{"type": "image"}]}]
REFUSED = {
    "broken": (lambda tmp: ROW | {"images": [broken(tmp)]}, "image 0 cannot be read"),
    "no such file": (lambda tmp: ROW | {"images": [tmp / "none.png"]}, "image 0 cannot be read"),
    "a URL": (lambda tmp: ROW | {"images": ["https://example.org/x.png"]}, "is a URL"),
    "a number": (lambda tmp: ROW | {"images": [5]}, "image 0 is a int"),
    "not a list": (lambda tmp: ROW | {"images": picture(1)}, "pass a list"),
    "one too many": (lambda tmp: ROW | {"images": [picture(1)] * 2}, "1 times but has 2 images"),
    "missing": (lambda tmp: ROW | {"prompt": "w30 <image> <image>"}, "2 times but has 1 images"),
    "no place": (lambda tmp: ROW | {"prompt": [20, 21]}, "holds 0 image tokens"),
    "too few ids": (lambda tmp: ROW | {"prompt": [20, 3, 21]}, "holds 1 image tokens"),
    "neither": (lambda tmp: ROW | {"prompt": [None]}, "neither token ids nor text"),
    "videos": (lambda tmp: ROW | {"videos": ["x.mp4"]}, "videos and sounds are not supported"),
    "a video": (lambda tmp: VIDEO, "only text and images are supported"),
    "a part without": (lambda tmp: BARE, "without an image"),
    "parts": (lambda tmp: {"prompt": BARE, "images": [picture(1)] * 2}, "1 image parts but 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name_in_the_caller(case, tmp_path):
    make, message = REFUSED[case]
    with generator_of("llava") as generator:
        with pytest.raises(InvalidRequestError, match=f"^input 1.*{message}[^\n]*$"):
            generator.generate_batch([[20, 21], make(tmp_path)], sampling_params=greedy())
        # Its neighbour is served.
        outputs = rollout(generator, [[20, 21], make(tmp_path)], greedy(2), on_error="return")
    assert [output.status.value for output in outputs] == ["finished", "failed"]


@each_type("idefics3")
def test_a_picture_of_one_pixel_works_or_is_named(model_type):
    with generator_of(model_type) as generator:
        (output,) = rollout(generator, [chat(picture(1, (1, 1)))], greedy(2), on_error="return")
    assert output.status.value == "finished" or "input 0" in output.error


ODD = {
    "long": picture(1, (10_000, 3)),
    "empty": np.zeros((0, 0, 3), np.uint8),
    "of texts": np.full((4, 4, 3), "x"),
    "one axis": np.zeros(7, np.uint8),
    "six axes": np.zeros((1, 1, 1, 4, 4, 3), np.uint8),
    "of floats": np.random.default_rng(0).random((8, 8, 3)),
    "of bits": np.ones((8, 8, 3), bool),
    "channels first": np.zeros((3, 8, 8), np.uint8),
}


@each_type("llava")
def test_odd_arrays_and_sizes_work_or_are_named_and_their_neighbours_go_on(model_type):
    with generator_of(model_type) as generator:
        rows = [chat(image) for image in ODD.values()]
        outputs = rollout(generator, [*rows, [20, 21]], greedy(2), on_error="return")
    for index, (case, output) in enumerate(zip([*ODD, "text"], outputs, strict=True)):
        is_right = output.status.value == "finished" or f"input {index}" in output.error
        assert is_right, (case, output.error)
    assert outputs[-1].status.value == "finished"


def test_a_turned_photograph_is_read_upright(tmp_path):
    turned = picture(1, (60, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    with generator_of(MROPE) as generator:
        upright = turned.transpose(Image.Transpose.ROTATE_270)
        outputs = rollout(generator, [chat(tmp_path / "turned.png"), chat(upright)], greedy(2))
    assert outputs[0].images.digest == outputs[1].images.digest


@pytest.mark.parametrize("tokenizer", [None, word_tokenizer()])
def test_images_without_a_processor_are_refused(tokenizer):
    model, _ = made("llava")
    with (
        RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator,
        pytest.raises(InvalidRequestError, match="need the model's processor"),
    ):
        generator.generate_batch([ROW], sampling_params=greedy())


def test_images_for_a_model_that_reads_text_alone_are_refused():
    _, processor = made("llava")
    with (
        RolloutGenerator(tiny_model(), RolloutConfig(seed=0), tokenizer=processor) as generator,
        pytest.raises(ConfigurationError, match=r"Qwen3ForCausalLM.forward accepts none of"),
    ):
        generator.generate_batch([ROW], sampling_params=greedy())


def test_a_model_that_computes_images_otherwise_with_a_cache_is_refused(monkeypatch):
    """Its next tokens look at the picture again, which no cache keeps."""
    model, processor = made("llava")
    model = copy.deepcopy(model)
    own_forward = type(model).forward

    class Looking(type(model)):
        @wraps(own_forward)
        def forward(self, *, input_ids, pixel_values=None, use_cache=None, **others):
            output = own_forward(
                self, input_ids=input_ids, pixel_values=pixel_values, use_cache=use_cache, **others
            )
            if pixel_values is not None and not use_cache:
                output.logits = output.logits * (1 + pixel_values.abs().mean())
            return output

    model.__class__ = Looking
    with (
        RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=processor) as generator,
        pytest.raises(ConfigurationError, match=r"^Looking cannot run prompts with images .*\.$"),
    ):
        generator.generate_batch([ROW], sampling_params=greedy())


def test_a_preempted_sequence_with_images_is_computed_again():
    model, processor = made(MROPE)
    chats = [chat(picture(seed)) for seed in range(3)]
    settings = {"num_blocks": 14}
    with generator_of(MROPE, **settings) as generator:
        outputs = rollout(generator, chats, sampled(12), num_return_sequences=2)
        assert generator.manager.counters.preemptions > 0
    for output, messages in zip(outputs, [c for c in chats for _ in range(2)], strict=True):
        assert_plain(model, output, processed(processor, messages))


TILES = (
    "rows with other numbers of tiles have pixels of other shapes, and packing does not join them"
)


@pytest.mark.fast_cases("qwen2_5_vl")
@each_type(MROPE, "gemma3", failing={"idefics3": TILES})
def test_packed_logprobs_of_images_and_their_gradients_are_those_of_plain_forwards(model_type):
    model, processor = made(model_type)
    model = copy.deepcopy(model)
    chats = [chat(picture(1)), chat(picture(2, (64, 24)), picture(3)), chat()]
    with generator_of(model_type) as generator:
        outputs = rollout(generator, chats, sampled(), num_return_sequences=2)
    parameters = dict(model.named_parameters())
    found = packed_logprobs(model, outputs)
    # The tokens of Gemma 3's images see each other in both directions.
    is_padded = list(_LAYOUTS[model].layouts.values()) == [PackingLayout.PADDED]
    assert is_padded is (model_type == "gemma3")
    sum(part.sum() for part in found).backward()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    model.zero_grad()
    for index, (output, logprobs) in enumerate(zip(outputs, found, strict=True)):
        tensors = processed(processor, chats[index // 2])
        logits = plain_logits.__wrapped__(model, tensors, output.generated_tokens)
        tokens = torch.tensor(output.generated_tokens)[:, None]
        expected = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        expected.sum().backward()
    assert any("vision" in name or "visual" in name for name in gradients)
    for name, gradient in gradients.items():
        size = max(1.0, float(parameters[name].grad.abs().max()))
        assert (gradient - parameters[name].grad).abs().max() <= 10 * TOLERANCE * size, name


@pytest.mark.fast_cases("qwen2_5_vl")
@each_type(MROPE, "gemma3", failing={"idefics3": TILES})
def test_packed_logprobs_encode_a_picture_of_an_earlier_turn_once(model_type, monkeypatch):
    model, processor = made(model_type)
    model = copy.deepcopy(model)
    with generator_of(model_type) as generator:
        # The first prompt with several pictures is checked beside.
        rollout(generator, [chat(picture(8), picture(9))], greedy(1))
        (first,) = rollout(generator, [chat(picture(1))], sampled())
        turn = [*first.prompt_ids, *first.generated_tokens]
        rows = [
            {"prompt": turn + first.prompt_ids, "images": [picture(1), picture(other)]}
            for other in (4, 5)
        ]
        outputs = [first, *rollout(generator, rows, sampled())]
    packed, pack = [], logprobs_module.pack

    def recorded(*arguments, **more):
        packed.append(pack(*arguments, **more))
        return packed[-1]

    monkeypatch.setattr(logprobs_module, "pack", recorded)
    model.zero_grad()
    found = packed_logprobs(model, outputs)
    sum(part.sum() for part in found).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole = sum(len(o.prompt_ids) + len(o.generated_tokens) - 1 for o in outputs)
    if model_type not in COMPUTED_TOGETHER:
        shared = len(turn) - 1 + len(turn)
        assert sum(batch.num_tokens for batch in packed[-1]) <= whole - shared + 4
    tensors = [processed(processor, chat(picture(1))), *(of_ids(processor, row) for row in rows)]
    for output, inputs, logprobs in zip(outputs, tensors, found, strict=True):
        logits = plain_logits.__wrapped__(model, inputs, output.generated_tokens)
        tokens = torch.tensor(output.generated_tokens)[:, None]
        expected = logits.log_softmax(-1).gather(-1, tokens)[:, 0]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        expected.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            size = max(1.0, float(parameter.grad.abs().max()))
            assert (gradients[name] - parameter.grad).abs().max() <= 10 * TOLERANCE * size, name


def test_packed_logprobs_refuse_a_prompt_whose_images_they_lack():
    model, _ = made("llava")
    with generator_of("llava") as generator:
        (output,) = rollout(generator, [ROW], sampled())
    output.images = None
    with pytest.raises(ConfigurationError, match=r"^req_0 holds image tokens but no images.*\.$"):
        packed_logprobs(model, [output])


def test_a_strategy_submits_the_images_of_a_row():
    with generator_of("llava") as generator:
        (expected,) = rollout(generator, [ROW], greedy())
        stream = RequestStream(generator, sampled())
        rows = [ROW | {"answer": 7}]
        groups = GroupCollector(stream, rows, lambda row, outputs: [1.0, 2.0], num_generations=2)
        (group,) = groups.collect(1)
        groups.close()
    assert group.outputs[0].prompt_ids == expected.prompt_ids


def test_a_picture_too_large_to_decode_is_refused_by_name(tmp_path, monkeypatch):
    model, processor = tiny_vision_model(MROPE)
    path = tmp_path / "large.png"
    picture(0).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with (
        RolloutGenerator(model, tokenizer=processor) as generator,
        pytest.raises(InvalidRequestError, match="input 0: image 0 cannot be read"),
    ):
        generator.generate_batch([{"prompt": "<image> w60", "images": [path]}])
