"""Define an audit's result: causes with their advice, and the evidence for each. Plain data."""

from dataclasses import dataclass
from enum import StrEnum

from cb_rollout.engine.numerics.agreement import Agreement

# Causes that the text of a report lists.
NUM_LISTED = 5

# A larger score shows that the draw is not the claimed one; chance exceeds this limit once in a
# million reports.
LEAST_Z_SCORE = 5.0

# Detail of the cause "rounding" if no number was reported, so that nothing was tested.
NO_NUMBERS = "none was reported"

_UPDATE = "Copy the weights to the engine after every update, and check that it answers for it."
_REPORT = "Have the engine report the numbers that the loss assumes, or the loss assume these."


class Cause(StrEnum):
    """The origin of a difference between reported and recomputed log-probabilities."""

    advice: str

    def __new__(cls, value: str, advice: str) -> "Cause":
        """Make a member with its advice."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.advice = advice
        return member

    ROUNDING = "rounding", "Nothing is wrong with the log-probabilities."
    OLDER_VERSION = "older version", _UPDATE
    STALE_PROMPT_KEYS = "prompt keys of an older version", "Reset its prefix cache at each update."
    OLD_KEYS_KEPT = "updated in flight, old keys kept", "Abort or recompute unfinished sequences."
    UPDATED = "updated in flight, keys computed again", "Give the trainer each token's version."
    STALE_LAYER = "one layer of an older version", "Compare the names sent with those loaded."
    NO_ADAPTER = "adapter missing", "Load the adapter in the engine, or merge it before the sync."
    OTHER_ADAPTER = "another adapter", "Name the trained adapter in the engine's requests."
    ADAPTER_TWICE = "adapter applied twice", "Send base weights, or unload the engine's adapter."
    ADAPTER_MERGED = "adapter merged in 16 bits", "Merge in float32, or do not merge."
    TEMPERATURE = "temperature", _REPORT
    TOP_K = "top-k", _REPORT
    TOP_P = "top-p", _REPORT
    MIN_P = "min-p", _REPORT
    PENALTIES = "penalties", _REPORT
    SAMPLING_PARAMS = "sampling parameters", _REPORT
    MODEL_16BIT = "model in 16 bits", "Run engine and trainer in one precision."
    QUANTISED = "quantised weights", "Sample from the weights that are trained."
    HEAD_16BIT = "head in 16 bits", "Compute the engine's head in float32."
    LOGITS_16BIT = "logits in 16 bits", "Keep the engine's logits in float32."
    LOGPROBS_16BIT = "log-probabilities in 16 bits", "Compute and send log-softmax in float32."
    NEIGHBOUR = "log-probabilities of a neighbouring token", "Align them with the tokens."
    BOS_TWICE = "BOS twice", "Tokenise rendered chats with add_special_tokens=False."
    BOS_MISSING = "BOS missing", "Send token ids, or have the engine add the BOS token."
    SPECIAL_TOKENS_DROPPED = "special tokens dropped", "Send token ids, or keep special tokens."
    RETOKENISED = "prompt tokenised again", "Send token ids to the engine, not text."
    OTHER_TOKENIZER = "another tokenizer", "Load the trainer's tokenizer, or send token ids."
    TEMPLATE_TWICE = "chat template twice", "Send token ids, or a chat that is not rendered yet."
    ROPE = "RoPE scaled by another length", "Scale by each sequence's length (see max_model_len)."
    POSITIONS = "positions shifted", "Count positions from a sequence's first token."
    PADDING_ATTENDED = "padding attended to", "Pass the attention mask of padded prompts."
    IMAGES_IGNORED = "images ignored", "Send the images, and check that the engine reads them."
    IMAGES_EXCHANGED = "images exchanged", "Send each prompt its own images."
    ROUTES = "experts chosen otherwise", "Replay the experts in the loss (router_replay=True)."


@dataclass(frozen=True, slots=True)
class Evidence:
    """The degree to which one cause explains the reported log-probabilities."""

    cause: Cause
    detail: str
    """The parameter of the cause, such as `top_k=50` or a version; empty: no parameter."""
    nats_per_token: float
    """Log-likelihood ratio to rounding alone, per token, minus a penalty for fitted parameters."""
    explains: bool
    """True: the remaining difference is the model's own rounding."""
    agreement: Agreement
    """Distance of the reported numbers from the predicted ones, with the noise."""

    @property
    def name(self) -> str:
        """Return the cause with its parameter."""
        return f"{self.cause} ({self.detail})" if self.detail else str(self.cause)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The ranked causes of a difference in log-probabilities; truthy if rounding explains it."""

    evidence: tuple[Evidence, ...]
    """The best explanation first; causes that explain too little follow, the nearest first."""
    draw_z_score: float | None
    """Test of the draw: how many standard deviations the tokens' mean of -logprob lies above its
    expected value, the entropy of the claimed distribution. None: decoding was greedy, or rounding
    does not explain the numbers."""
    starts: dict[str, int | None]
    """By request id, the index of the generated token at which the difference begins, counted from
    0; None: there is no difference."""
    num_tokens: int

    @property
    def cause(self) -> Cause | None:
        """Return the cause; None: no tested cause explains the numbers."""
        return self.evidence[0].cause if self.evidence[0].explains else None

    def __bool__(self) -> bool:
        if self.cause is not Cause.ROUNDING:
            return False
        return self.draw_z_score is None or abs(self.draw_z_score) < LEAST_Z_SCORE

    @property
    def sentence(self) -> str:
        """Return the cause in one sentence, and what to do."""
        first = self.evidence[0]
        if self.cause is None:
            return (
                f"No tested cause explains the log-probabilities; the nearest is {first.name}. "
                "Pass earlier versions, the tokenizer and the sampling parameters to test more."
            )
        if self.cause is not Cause.ROUNDING:
            return f"Log-probabilities differ by: {first.name}. {first.cause.advice}"
        detail = f" ({first.detail})" if first.detail else ""
        has_numbers = first.detail != NO_NUMBERS
        if self and not has_numbers:
            return f"None of {self.num_tokens:,} tokens has a reported log-probability; all fit."
        if self:
            return f"Rounding explains {self.num_tokens:,} log-probabilities{detail}."
        numbers = f"Log-probabilities are right{detail}" if has_numbers else "None was reported"
        return (
            f"{numbers}, but tokens do not fit the claimed distribution "
            f"(z = {self.draw_z_score:+.1f}). Pass truncation and penalties as sampling_params; "
            "else the engine samples otherwise than it reports."
        )

    def __str__(self) -> str:
        lines = [self.sentence]
        for evidence in self.evidence[:NUM_LISTED]:
            nats = f"{evidence.nats_per_token:+8.2f} nats a token"
            lines.append(f"  {nats}  {evidence.name}: {evidence.agreement}")
        starts = sorted(start for start in self.starts.values() if start is not None)
        if starts and self.cause is not Cause.ROUNDING:
            where = f"{len(starts)} of {len(self.starts)} sequences"
            middle = starts[len(starts) // 2]
            lines.append(f"It begins in {where}, at generated token {middle}.")
        return "\n".join(lines)
