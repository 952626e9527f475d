"""A parser of report pages, and a recorded sequence, for the tests of reports."""

from html.parser import HTMLParser

from cb_rollout.metrics.run_records import SequenceRecord

VOID = {"meta", "br", "link", "img"}
FORBIDDEN = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}


class Page(HTMLParser):
    """Every tag's nesting, every title, and all text of a page; fails on what is not closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.titles, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), names
        assert not any(name.startswith("on") for name in names), names
        self.tags.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def a_sequence(step=1, tokens=("4", "</s>"), logprobs=None, **changes):
    tokens = list(tokens)
    values = {
        "step": step,
        "mode": "train",
        "request_id": "r0",
        "prompt": "2+2=",
        "tokens": tokens,
        "token_ids": list(range(len(tokens))),
        "logprobs": [-0.25] * len(tokens) if logprobs is None else logprobs,
        "policy_versions": [(6, len(tokens))] if tokens else [],
        "reward": 0.75,
        "finish_reason": "stop",
    }
    return SequenceRecord(**values | changes)
