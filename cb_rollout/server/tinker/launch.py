"""Start and end a server of Tinker's API, which runs in threads of this process."""

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError
from cb_rollout.server.handle import CLOSE_SECONDS, bound_socket, run_application
from cb_rollout.server.options import ServerOptions


class TinkerServer(AbstractContextManager["TinkerServer"]):
    """A running server.

    Attributes:
        url: the `base_url` of `tinker.ServiceClient`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        options: ServerOptions,
        checkpoints: Path,
        config: RolloutConfig | None = None,
    ) -> None:
        """Serve LoRA training and sampling of a model until it is closed.

        Args:
            model: a causal language model of transformers, whole on one device.
            tokenizer: the model's tokenizer.
            options: address, key and limits; `model_name` is the client's `base_model`.
            checkpoints: folder for clients' checkpoints.
            config: settings of the engine.

        Raises:
            ConfigurationError: the extra `tinker` is not installed, the model is not supported, or
                the address cannot be bound.
        """
        names = ("tinker", "fastapi", "uvicorn")
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f"Tinker's API needs {' and '.join(missing)}: pip install 'cb_rollout[tinker]'."
            )
        from cb_rollout.server.tinker.app import create_app
        from cb_rollout.server.tinker.policies import Policies
        from cb_rollout.server.tinker.service import TinkerService
        from cb_rollout.server.tinker.store import CheckpointStore

        listening = bound_socket(options)
        try:
            store = CheckpointStore(checkpoints)
            policies = Policies(model, tokenizer, config)
            service = TinkerService(policies, store, options.model_name)
            application = create_app(service, options)
            self._server, self._thread = run_application(application, options, listening)
        except BaseException:
            listening.close()
            raise
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def is_running(self) -> bool:
        """Return whether the server answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Close the server after the running request; waiting requests fail."""
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()
