"""Handle Tinker's requests: start a job for each, and return the job, whose id the client gets.

Owns sessions, training runs and samplers. Called on the server's asyncio thread; all computation
runs in jobs.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import InvalidRequestError
from cb_rollout.server.tinker import wire
from cb_rollout.server.tinker.jobs import Job, Jobs
from cb_rollout.server.tinker.policies import (
    BASE,
    AdamSettings,
    LoraSettings,
    Policies,
    SampleRequest,
    Samples,
)
from cb_rollout.server.tinker.store import (
    SAMPLER,
    TRAINING,
    CheckpointStore,
    StoredCheckpoint,
)

Body = Mapping[str, Any]

# Maximum number of completions of one request.
MAX_SAMPLES = 1024


class TinkerService:
    """The requests of all clients."""

    def __init__(self, policies: Policies, store: CheckpointStore, model_name: str) -> None:
        """Serve the base model under `model_name`."""
        self.policies = policies
        self.store = store
        self.model_name = model_name
        self.jobs = Jobs(self._sample)
        self._sessions: set[str] = set()
        self._runs: dict[str, LoraSettings] = {}
        # The checkpoint that each sampler samples with; None: the base model.
        self._samplers: dict[str, StoredCheckpoint | None] = {}
        # The adapter of each checkpoint in memory. Only the job thread reads and writes this dict.
        self._adapters: dict[StoredCheckpoint | None, str] = {None: BASE}

    # Sessions

    def create_session(self) -> str:
        """Begin a client's session; return its id."""
        session_id = secrets.token_hex(8)
        self._sessions.add(session_id)
        return session_id

    def require_session(self, session_id: Any) -> str:
        """Return a session's id, or raise `InvalidRequestError` for an unknown one."""
        if session_id not in self._sessions:
            raise InvalidRequestError(
                f"session {session_id!r} is unknown; the server may have been started again."
            )
        return session_id

    def finish_session(self, session_id: str) -> None:
        """End a session, and forget its training runs once their requests have run."""
        self.require_session(session_id)
        self._sessions.discard(session_id)

        def unload() -> None:
            for run in [run for run in self._runs if run.startswith(f"{session_id}:")]:
                self.policies.remove(_adapter_of_run(run))
                del self._runs[run]

        self._submit(f"{session_id}:finish", unload)

    # Training

    def create_model(self, body: Body) -> Job:
        """Create a training run."""
        session_id = self.require_session(body.get("session_id"))
        self._require_base_model(body.get("base_model"))
        self._require_adamw(body.get("optimizer_config"))
        lora = LoraSettings(**body.get("lora_config", {}))
        run = _run_id(session_id, body["model_seq_id"])

        def create() -> dict[str, Any]:
            self.policies.create(_adapter_of_run(run), lora)
            self._runs[run] = lora
            return {"type": "create_model", "model_id": run}

        return self._submit(f"{run}:create", create)

    def unload_model(self, body: Body) -> Job:
        """Forget a training run."""
        run = body["model_id"]

        def unload() -> dict[str, Any]:
            self._require_run(run)
            self.policies.remove(_adapter_of_run(run))
            del self._runs[run]
            return {"type": "unload_model", "model_id": run}

        return self._submit(f"{run}:unload", unload)

    def forward_backward(self, request: wire.ForwardBackwardRequest) -> Job:
        """Compute a loss, and its gradients."""
        run = request.model_id

        def compute() -> bytes:
            self._require_run(run)
            result = self.policies.forward_backward(
                _adapter_of_run(run),
                request.data,
                request.loss,
                request.settings,
                is_forward_only=request.is_forward_only,
            )
            return wire.written_outputs(result.outputs, {"loss:sum": result.total})

        return self._submit(f"{run}:{request.seq_id}", compute)

    def optim_step(self, body: Body) -> Job:
        """Take an optimizer step."""
        run = body["model_id"]
        if "adam_params" not in body:
            raise InvalidRequestError("optimizer_params are not AdamW's; send AdamParams.")
        params = dict(body["adam_params"])
        adam = AdamSettings(max_norm=params.pop("grad_clip_norm", 0.0), **params)

        def step() -> dict[str, Any]:
            self._require_run(run)
            metrics = self.policies.step(_adapter_of_run(run), adam)
            return {"type": "optim_step", "metrics": metrics}

        return self._submit(_request_id(run, body), step)

    # Checkpoints

    def save_weights(self, body: Body) -> Job:
        """Save a run's adapter and its optimizer's state."""
        run = body["model_id"]

        def save() -> dict[str, Any]:
            self._require_run(run)
            checkpoint = self.policies.checkpoint(_adapter_of_run(run), with_optimizer=True)
            overwrite = bool(body.get("overwrite"))
            path = self.store.save(run, TRAINING, body.get("path"), checkpoint, overwrite=overwrite)
            return {"type": "save_weights", "path": path}

        return self._submit(_request_id(run, body), save)

    def save_weights_for_sampler(self, body: Body) -> Job:
        """Save a run's adapter for sampling; without a name, also begin a sampling session."""
        run = body["model_id"]
        if body.get("kind", "snapshot") != "snapshot":
            raise InvalidRequestError(
                f"kind={body['kind']!r} is not offered; a sampling client here keeps the weights "
                "that it was made with (kind='snapshot')."
            )

        def save() -> dict[str, Any]:
            self._require_run(run)
            checkpoint = self.policies.checkpoint(_adapter_of_run(run), with_optimizer=False)
            path = self.store.save(run, SAMPLER, body.get("path"), checkpoint, overwrite=True)
            answer = {"type": "save_weights_for_sampler", "path": path}
            if body.get("path") is None:
                answer["sampling_session_id"] = self._new_sampler(self.store.find(path))
            return answer

        return self._submit(_request_id(run, body), save)

    def load_weights(self, body: Body) -> Job:
        """Load a checkpoint into a training run, or into a new training run."""
        is_new = body.get("session_id") is not None
        run = str(body.get("model_id"))
        if is_new:
            session_id = self.require_session(body["session_id"])
            run = _run_id(session_id, body["model_seq_id"])
            self._require_adamw(body.get("optimizer_config"))

        def load() -> dict[str, Any]:
            checkpoint = self.store.load(body["path"])
            if is_new:
                self.policies.create(_adapter_of_run(run), checkpoint.lora)
                self._runs[run] = checkpoint.lora
            self._require_run(run)
            self.policies.load(
                _adapter_of_run(run), checkpoint, with_optimizer=bool(body.get("optimizer"))
            )
            return {"type": "load_weights", "path": body["path"], "model_id": run}

        return self._submit(f"{run}:{body.get('seq_id', 'load')}", load)

    # Sampling

    def create_sampling_session(self, body: Body) -> str:
        """Begin a sampling session of the base model or of a checkpoint; return its id."""
        self.require_session(body.get("session_id"))
        path = body.get("model_path")
        if path is None:
            self._require_base_model(body.get("base_model"))
        return self._new_sampler(None if path is None else self.store.find(path))

    def sample(self, body: Body) -> tuple[Job, list[str]]:
        """Complete a prompt; return the job, and one id per completion."""
        refused = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
        for name in refused:
            if body.get(name):
                raise InvalidRequestError(f"{name} is not offered here; leave it out.")
        session_id = body.get("sampling_session_id")
        checkpoint = self._checkpoint_of_sample(session_id, body.get("model_path"))
        num_samples = body.get("num_samples", 1)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidRequestError(f"num_samples={num_samples} is not in [1, {MAX_SAMPLES}].")
        prompt_ids = wire.text_of_prompt(body["prompt"])
        num_top = body.get("topk_sample_logprobs", 0)
        prompt_top_k = body.get("topk_prompt_logprobs", 0) or None
        if prompt_top_k is None and body.get("prompt_logprobs"):
            prompt_top_k = 0
        last_n = body.get("prompt_logprobs_last_n")
        first_scored = 0 if last_n is None else max(0, len(prompt_ids) - last_n)
        request = SampleRequest(
            prompt_ids=prompt_ids,
            params=sampling_params(body["sampling_params"], num_top),
            num_samples=num_samples,
            prompt_top_k=prompt_top_k,
        )

        def answer(samples: Samples) -> bytes:
            return wire.written_samples(samples.outputs, samples.scores, num_top, first_scored)

        number = body.get("seq_id")
        request_id = secrets.token_hex(8) if session_id is None else f"{session_id}:{number}"
        job = Job(request_id, sampler=checkpoint, sample=request, answer=answer)
        self.jobs.submit(job)
        return job, [f"{request_id}:{index}" for index in range(num_samples)]

    def path_of_sampler(self, sampler_id: str) -> str | None:
        """Return the URI of a sampler's checkpoint; None: it samples with the base model.

        Raises:
            InvalidRequestError: the sampler is unknown.
        """
        if sampler_id not in self._samplers:
            raise InvalidRequestError(f"sampler {sampler_id!r} is unknown.")
        checkpoint = self._samplers[sampler_id]
        return None if checkpoint is None else checkpoint.uri

    def lora_of_run(self, run: str) -> LoraSettings:
        """Return the adapter of a run, or raise `InvalidRequestError`."""
        self._require_run(run)
        return self._runs[run]

    def close(self) -> None:
        """Stop the job thread and the engine."""
        self.jobs.close()
        self.policies.close()

    def _submit(self, job_id: str, run: Callable[[], Any]) -> Job:
        job = Job(job_id, run=run)
        self.jobs.submit(job)
        return job

    def _checkpoint_of_sample(
        self, session_id: str | None, path: str | None
    ) -> StoredCheckpoint | None:
        """Return the checkpoint of a sampling session, or else that of a URI."""
        if session_id is None:
            return None if path is None else self.store.find(path)
        if session_id not in self._samplers:
            raise InvalidRequestError(
                f"sampling session {session_id!r} is unknown; create another."
            )
        return self._samplers[session_id]

    def _sample(
        self, requests: Sequence[tuple[StoredCheckpoint | None, SampleRequest]]
    ) -> list[Samples]:
        """Complete prompts, each with its checkpoint's adapter, on the thread that computes.

        There are at most `MAX_SAMPLERS` checkpoints, so that all adapters are in memory together.
        """
        checkpoints = dict.fromkeys(checkpoint for checkpoint, _ in requests)
        # Mark the adapters in memory as used first: loading others evicts the least recently used.
        for checkpoint in checkpoints:
            adapter = self._adapters.get(checkpoint)
            if adapter is not None and not self.policies.has_sampler(adapter):
                del self._adapters[checkpoint]
        for checkpoint in checkpoints:
            if checkpoint is not None and checkpoint not in self._adapters:
                loaded = self.store.load(checkpoint)
                adapter = f"sampler_{secrets.token_hex(8)}"
                self.policies.add_sampler(adapter, loaded)
                self._adapters[checkpoint] = adapter
        named: list[tuple[str, SampleRequest]] = []
        for checkpoint, wanted in requests:
            named.append((self._adapters[checkpoint], wanted))
        return self.policies.sample(named)

    def _new_sampler(self, checkpoint: StoredCheckpoint | None) -> str:
        sampler_id = secrets.token_hex(8)
        self._samplers[sampler_id] = checkpoint
        return sampler_id

    def _require_run(self, run: str | None) -> None:
        if run not in self._runs:
            raise InvalidRequestError(f"training run {run!r} is unknown, or was unloaded.")

    def _require_base_model(self, name: Any) -> None:
        if name != self.model_name:
            raise InvalidRequestError(
                f"base_model={name!r} is not served; this server has {self.model_name!r}."
            )

    def _require_adamw(self, optimizer: Any) -> None:
        kind = "adamw" if optimizer is None else optimizer.get("type")
        if kind != "adamw":
            raise InvalidRequestError(f"the optimizer {kind!r} is not offered; take AdamW.")


def _run_id(session_id: str, number: int) -> str:
    """Return a run's id, which the client can compute itself."""
    return f"{session_id}:train:{number}"


def _request_id(run: str, body: Body) -> str:
    """Return a request's id, so that a request that is sent twice runs once."""
    number = body.get("seq_id")
    return f"{run}:{secrets.token_hex(8) if number is None else number}"


def _adapter_of_run(run: str | None) -> str:
    """Return the name of a run's adapter."""
    return f"policy:{run}"


def sampling_params(given: Body, num_top: int) -> SamplingParams:
    """Return the sampling parameters that a client asks for.

    Args:
        given: Tinker's `SamplingParams`.
        num_top: number of the likeliest tokens to report at each position.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    top_k = given.get("top_k", -1)
    settings: dict[str, Any] = {
        "temperature": given.get("temperature", 1.0),
        "top_p": given.get("top_p", 1.0),
        "top_k": 0 if top_k == -1 else top_k,
        "max_new_tokens": given.get("max_tokens"),
        "seed": given.get("seed"),
        "top_logprobs": num_top,
    }
    stop = given.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else list(stop)
        texts = tuple(value for value in stops if isinstance(value, str))
        tokens = tuple(value for value in stops if not isinstance(value, str))
        settings |= {"stop": texts, "stop_token_ids": tokens, "ignore_eos": True}
    return SamplingParams(**settings)
