"""OpenAI's own client sends pictures to the server."""

import base64
import io

import openai
import pytest
from PIL import Image
from served import IDS, client, idle, served
from tiny_vision import picture, plain_logprobs, tiny_vision_model
from tokenizers import Tokenizer

from cb_rollout import SamplingParams

MAX_IMAGES, MAX_BYTES, MAX_PIXELS = 2, 40_000, 60 * 60
PARAM = "messages.0.content.1.image_url"

# A token whose text is that of two others, so that a client's copy of it is tokenized otherwise.
TWO_WORDS = 159

# A chat's answers are written as they were asked for, so that a conversation goes on.
TURNS = (
    "{% for message in messages %}{{ 'w50 ' if message.role == 'assistant' else 'w49 ' }}"
    "{% for part in message.content %}"
    "{{ 'w51 <image> w52 ' if part.type == 'image' else part.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}w50 {% endif %}"
)


def data_url(image, media_type="image/png", form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return f"data:{media_type};base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(*urls, text="w60 w61"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def as_chat(*pictures, text="w60 w61"):
    parts = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


@pytest.fixture(scope="module")
def serving():
    model, processor = tiny_vision_model("qwen2_5_vl")
    processor.chat_template = TURNS
    backend = processor.tokenizer.backend_tokenizer.to_str()
    backend = backend.replace(f'"w{TWO_WORDS}"', '"w20 w21"')
    processor.tokenizer._tokenizer = Tokenizer.from_str(backend)
    limits = {
        "max_images": MAX_IMAGES,
        "max_image_bytes": MAX_BYTES,
        "max_image_pixels": MAX_PIXELS,
    }
    with served(model=model, tokenizer=processor, **limits) as (generator, server):
        yield generator, server


@pytest.fixture
def chat(serving):
    generator, server = serving
    chats = client(server).chat.completions
    yield lambda messages, **settings: chats.create(model="policy", messages=messages, **settings)
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0


def test_an_answer_about_pictures_is_what_generate_batch_gives(serving, chat):
    generator, _ = serving
    pictures = [picture(1), picture(2, (30, 44))]
    urls = [data_url(pictures[0]), data_url(pictures[1], "image/webp", "PNG")]
    answer = chat(asked(*urls), seed=7, n=2, max_tokens=8, logprobs=True, extra_body=IDS)
    params = SamplingParams(seed=7, max_new_tokens=8)
    expected = generator.generate_batch(
        [as_chat(*pictures)], sampling_params=params, num_return_sequences=2
    )
    tensors = generator.tokenizer.apply_chat_template(
        as_chat(*pictures),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert answer.prompt_token_ids == tensors["input_ids"][0].tolist()
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    for choice, output in zip(answer.choices, expected.values(), strict=True):
        assert choice.token_ids == output.generated_tokens
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        plain = plain_logprobs(generator.manager.model, tensors, choice.token_ids)
        assert logprobs == pytest.approx(plain, abs=1e-5)


def test_a_stream_about_a_picture_adds_up_to_the_whole_answer(chat):
    settings = {"seed": 3, "max_tokens": 8, "logprobs": True, "extra_body": IDS}
    messages = asked(data_url(picture(5)))
    whole = chat(messages, **settings)
    chunks = [chunk.choices[0] for chunk in chat(messages, stream=True, **settings)]
    assert "".join(c.delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [t for c in chunks for t in getattr(c, "token_ids", [])] == whole.choices[0].token_ids


def test_prompts_of_equal_text_and_other_pictures_are_answered_apart(chat):
    first, second = (
        chat(asked(data_url(picture(seed))), seed=1, max_tokens=4, logprobs=True, extra_body=IDS)
        for seed in (11, 12)
    )
    assert first.prompt_token_ids == second.prompt_token_ids
    logprobs = [answer.choices[0].logprobs.content[0].logprob for answer in (first, second)]
    assert abs(logprobs[0] - logprobs[1]) > 1e-4


def test_a_chat_about_pictures_is_tokenized_as_a_whole_in_each_turn(chat):
    messages = asked(data_url(picture(21)))
    settings = {"max_tokens": 3, "extra_body": IDS, "logit_bias": {str(TWO_WORDS): 100}}
    first = chat(messages, **settings)
    assert first.choices[0].token_ids == [TWO_WORDS] * 3
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = chat([*messages, said, *asked(text="w63")], **settings)
    assert TWO_WORDS not in second.prompt_token_ids


REFUSED = {
    "http": ("https://example.org/a.png", "in base64; others are not fetched"),
    "file": ("file:///etc/passwd", "others are not fetched"),
    "path": ("/etc/passwd", "a picture is a URL of data:image/png"),
    "media type": ("data:image/svg+xml;base64,AAAA", "data:image/gif in base64"),
    "no base64": ("data:image/png,abc", "data:image/gif in base64"),
    "broken base64": ("data:image/png;base64,a*b=", "the data is not base64"),
    "no picture": ("data:image/png;base64,AAAA", "the picture cannot be read"),
    "cut off": (data_url(picture(1))[:-400], "the picture cannot be read"),
    "another format": (data_url(picture(1), form="TIFF"), "the picture cannot be read"),
    "too many pixels": (data_url(Image.new("1", (61, 60))), "61 x 60 pixels, and 3,600 are"),
    "a bomb": (data_url(Image.new("1", (15_000, 15_000))), "pixels"),
    "too many bytes": ("data:image/png;base64," + "A" * 60_000, "about 45,000 bytes, and 40,000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_picture_that_is_refused_is_named(chat, case):
    url, said = REFUSED[case]
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        chat(asked(url))
    assert refused.value.param == PARAM
    assert refused.value.body["message"].startswith(f"{PARAM}: ")


def test_other_unsuitable_pictures_are_refused_and_the_next_is_answered(serving, chat):
    url = data_url(picture(1))
    with pytest.raises(openai.BadRequestError, match="one picture more than the 2 of a") as refused:
        chat(asked(url, url, url))
    assert refused.value.param == "messages.0.content.3.image_url"
    marker = serving[0].tokenizer.image_token
    with pytest.raises(openai.BadRequestError, match=f"'{marker}', which stands for a picture"):
        chat(asked(url, text=f"w60 {marker}"))
    video = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError, match="video_url"):
        chat(video)
    assert chat(asked(url), max_tokens=2).choices[0].message.content


def test_a_model_of_text_refuses_pictures():
    with served() as (_, server):
        chats = client(server).chat.completions
        with pytest.raises(openai.BadRequestError, match="the model reads no pictures"):
            chats.create(model="policy", messages=asked(data_url(picture(1))))
        assert chats.create(model="policy", messages=asked(text="hello"), max_tokens=2).choices


def test_a_picture_that_does_not_run_is_refused_and_the_next_one_runs(monkeypatch):
    model, processor = tiny_vision_model("llava")
    with served(model=model, tokenizer=processor) as (generator, server):
        inputs = generator.manager.engine.runner.image_inputs
        chats = client(server).chat.completions
        messages = asked(data_url(picture(1)))
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "are_read", lambda *_: False)
            with pytest.raises(openai.BadRequestError, match="runs no such pictures here"):
                chats.create(model="policy", messages=messages)
        assert chats.create(model="policy", messages=messages, max_tokens=2).choices
        assert chats.create(model="policy", messages=asked(), max_tokens=2).choices


def test_a_response_about_pictures_has_the_tokens_of_its_chat(serving, chat):
    urls = [data_url(picture(1)), data_url(picture(2, (30, 44)))]
    expected = chat(asked(*urls), max_tokens=8, temperature=0)
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    content = [{"type": "input_text", "text": "w60 w61"}, *parts]
    responses = client(serving[1]).responses
    settings = {"model": "policy", "max_output_tokens": 8, "temperature": 0}
    answer = responses.create(input=[{"role": "user", "content": content}], **settings)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    content = [{"type": "input_text", "text": "w60"}, {"type": "input_image", "image_url": "x"}]
    with pytest.raises(openai.BadRequestError, match="a picture is a URL of") as caught:
        responses.create(input=[{"role": "user", "content": content}], **settings)
    assert caught.value.param == "input.content.1.image_url"
