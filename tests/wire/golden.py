"""One fixed instance of every message, and the bytes that it has on the wire.

`python -m tests.wire.golden` writes tests/golden/messages.json anew. That is legitimate in two cases only:
a message was added, or PROTOCOL_VERSION was raised in the same commit. Else two processes of different
commits would no longer understand each other, and would not know it. Until the first release the version
stays 1: nothing was given out that could misunderstand.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from common.codec import PROTOCOL_VERSION, Envelope
from common.kv.layout import KVLayout
from common.messages import (
    CODEC,
    Abort,
    Begun,
    Choice,
    Chunk,
    Commit,
    Credit,
    CudaPool,
    Failed,
    Finish,
    Granted,
    Hello,
    HelloAck,
    HostIdentity,
    PageLedger,
    PeerInfo,
    Peers,
    Prefill,
    PromptLogprobs,
    Quiesced,
    Refused,
    Rejected,
    RequestLogprobs,
    Role,
    SharedPool,
    Stats,
    StatsRequest,
    Status,
    Submit,
    Tokens,
    float32s,
    int32s,
)
from common.request import FinishReason, LogitBias, PrefillStamps, SamplingParams, TokenLogprobs

GOLDEN = Path(__file__).parent.parent / "golden" / "messages.json"
EPOCH = 0x0123456789ABCDEF
SEQ = 258

_HELLO = Hello(
    node_id="prefill-0",
    role=Role.PREFILL,
    host=HostIdentity("6f1c0f6e-0d0c-4a58-9f0e-3d2f6c5b4a39", 4026531836, 4242, 987654),
    model="sha256:5e884898",
    layout=KVLayout(layers=30, page_size=16, kv_heads=3, head_dim=64, dtype="bfloat16"),
    planes=("shm", "frames"),
    shm=SharedPool(fd=11, num_pages=4096),
    cuda=CudaPool(handle=bytes(range(64)), num_pages=4096, gpu="5f6e8a8c-1d2e-4f50-9a7b-0c1d2e3f4a5b"),
    verify_pages=True,
    listen="ipc:///tmp/baton/prefill-0",
    capacity_tokens=65536,
    prefill_budget_tokens=128,
)
_SAMPLING = SamplingParams(
    max_tokens=64,
    temperature=0.75,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=2**64 - 1,
    min_tokens=2,
    stop_token_ids=(2, 49152),
    ignore_eos=True,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.125,
    logit_bias=(LogitBias(42, -100.0), LogitBias(43, 2.5)),
    num_logprobs=2,
)
_GRANTED = Granted((7, 8), "prefill-0", queued_s=1000.5, granted_s=1000.75)
_STAMPS = PrefillStamps(1001.0, (1002.0, 1003.5), committed_s=1003.75)
_LOGPROBS = TokenLogprobs(-0.5, (101, 7), (-0.5, -1.25))

INSTANCES: tuple[Any, ...] = (
    _HELLO,
    HelloAck(_HELLO, accepted=True, reason="", plane="frames"),
    Status(
        last_seq_seen=17,
        open_ids=(1, 2**40),
        queued=3,
        running=2,
        steps=99,
        usable=True,
        total_bytes=2**33,
        sent_s=1000.5,
        echo_s=20.25,
        echo_came_s=1000.0,
    ),
    Abort(7),
    Failed(7, 503, "prefill-0: its process ended", retry_after_s=1),
    Submit(7, _SAMPLING, int32s([1, 2, 3]), timeout_ms=1500),
    Peers((PeerInfo("prefill-0", "ipc:///tmp/baton/prefill-0", EPOCH),)),
    _GRANTED,
    PromptLogprobs(8, float32s([-0.5, -2.25]), int32s([101, 7, 3, 4]), float32s([-0.5, -1.25, -2.0, -2.0])),
    Tokens(
        request_ids=(7, 8),
        finished=(Finish(8, FinishReason.LENGTH, prebuilt_s=1004.5, second_token_s=1004.75),),
        first=int32s([0, 5]),
        counts=int32s([2, 1]),
        token_ids=int32s([100, 101, 102]),
        logprobs=(RequestLogprobs(8, (_LOGPROBS,)),),
        begun=(Begun(_GRANTED, _STAMPS, arrived_s=1004.25),),
    ),
    Refused(7, 429, "the queue is full", code="overloaded", param=None, retry_after_s=2),
    StatsRequest(5),
    Stats(5, PageLedger(100, 90, 5, 0, 3, 2, 0), {"messages_late": 1, "transfers_done": 12}),
    Prefill(9, _SAMPLING, int32s([1, 2, 3]), int32s([11, 12])),
    Credit(2**26),
    Rejected(9, 400, "the prompt is longer than the pool"),
    Chunk(
        transfer_id=9,
        first_page=4,
        num_pages=2,
        total_bytes=8192,
        checksums=tuple(array("Q", [2**64 - 1, 1])),
        frames=(b"\x00\x01\x02\x03", b"\xff"),
    ),
    Commit(
        9,
        6,
        _STAMPS,
        (Choice(42, FinishReason.STOP, _LOGPROBS), Choice(43, None)),
        float32s([-0.5]),
        int32s([101, 7]),
        float32s([-0.5, -1.25]),
    ),
    Quiesced(9),
)


def frames_of(message: Any) -> list[str]:
    """The message's frames, each in hex."""
    return [bytes(frame).hex() for frame in CODEC.encode(Envelope(EPOCH, SEQ, message))]


def write() -> None:
    """Write the file anew."""
    messages = {type(message).__name__: frames_of(message) for message in INSTANCES}
    GOLDEN.write_text(json.dumps({"version": PROTOCOL_VERSION, "messages": messages}, indent=1) + "\n")


if __name__ == "__main__":
    write()
