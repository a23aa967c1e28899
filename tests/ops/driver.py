"""Run the real `serve` with stand-in processes: `python -m tests.ops.driver STALL_TIMEOUT [QUESTION]`.

STANDIN_NODES is the number of prefill nodes, and of decode nodes.
"""

from __future__ import annotations

import os
import sys

from common.config import (
    DecodeConfig,
    EngineConfig,
    GatewayConfig,
    LogConfig,
    ModelConfig,
    SupervisorConfig,
    TransferConfig,
)
from common.log import set_up_logging
from common.supervision.serve import Launch, ServeConfig, serve
from common.supervision.supervisor import ChildFailed


def _say_on_stdout(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Serve until a signal."""
    set_up_logging(LogConfig())
    num_nodes = int(os.environ.get("STANDIN_NODES", "1"))
    config = ServeConfig(
        model=ModelConfig(model="tiny"),
        engine=EngineConfig(),
        transfer=TransferConfig(),
        decode=DecodeConfig(),
        gateway=GatewayConfig(port=0),
        supervisor=SupervisorConfig(prefill=num_nodes, decode=num_nodes, stall_timeout=int(sys.argv[1])),
        log=LogConfig(),
    )
    launch = Launch((sys.executable, "-m", "tests.ops.standin"), os.environ)
    question = sys.argv[2] if len(sys.argv) > 2 else None
    try:
        return serve(config, launch, _say_on_stdout, question)
    except ChildFailed as error:
        sys.stderr.write(f"baton: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
