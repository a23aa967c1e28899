"""Every message on every link, one frozen dataclass each.

    gateway -> D    Submit  Abort  Peers
    D -> gateway    Granted  PromptLogprobs  Tokens  Refused  Failed
    gateway -> node StatsRequest         node -> gateway  Stats
    D -> P          Prefill  Abort  Credit
    P -> D          Rejected  Chunk  Commit  Failed  Quiesced
    both ways       Hello  HelloAck  Status

A number that identifies something is unique within the sender's or owner's epoch: a `request_id` is the
gateway's, a `transfer_id` the decode node's. `Abort` and `Failed` carry whichever the link is about.

The schema is enforced by `codec.py`; tests/golden pins the bytes; docs/protocol.md explains the order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from common.codec import MAX_FRAMES, Buffer, Codec, FloatArray, Frames, IntArray, ItemType, MaxLen, Range
from common.kv.layout import KVLayout
from common.request import FinishReason, LogprobArrays, PrefillStamps, SamplingParams, Seconds, TokenLogprobs

Int32s = Annotated[IntArray, ItemType("i")]
Float32s = Annotated[FloatArray, ItemType("f")]
_U64 = Annotated[int, Range(0, 2**64 - 1)]
_Id = Annotated[int, Range(1, 2**63 - 1)]
_FirstId = Annotated[int, Range(1, 2**62 - 1)]  # so that those of the other choices are ids, too
_HttpStatus = Annotated[int, Range(400, 599)]
_TimeoutMs = Annotated[int, Range(1, 10**12)]

NODE_DRAINING = "node_draining"  # the code of `Refused` that sends a request to another decode node


def int32s(values: Iterable[int] = ()) -> IntArray:
    """Make an array of int32, the type of token ids and page ids on the wire."""
    return array("i", values)


def float32s(values: Iterable[float] = ()) -> FloatArray:
    """Make an array of float32, the type of log probabilities in arrays."""
    return array("f", values)


class Role(Enum):
    """What a process does."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


# --- every link ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Names a process on a host.

    Whoever reads it is on the same host exactly when boot id and PID namespace are its own, and the process
    that it sees under the pid started at that time.
    """

    boot_id: str
    pid_namespace: int
    pid: Annotated[int, Range(1, 2**22)]  # the kernel's PID_MAX_LIMIT
    start_time: int  # clock ticks since boot, /proc/PID/stat field 22


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A decode node's KV pool as memory that a process on its host can map: /proc/PID/fd/`fd`."""

    fd: Annotated[int, Range(0, 2**31 - 1)]
    num_pages: int


@dataclass(frozen=True, slots=True)
class CudaPool:
    """A decode node's KV pool as memory of a GPU that a process on its host can map by this handle."""

    handle: Annotated[bytes, MaxLen(64)]  # a cudaIpcMemHandle_t
    num_pages: int
    gpu: str  # its UUID: processes may number GPUs differently


@dataclass(frozen=True, slots=True)
class Hello:
    """Who I am and what I can do; the first message of a link. A mismatch refuses the peer."""

    node_id: str
    role: Role
    host: HostIdentity
    model: str  # fingerprint of the model folder
    layout: KVLayout | None = None  # None: a gateway holds no KV
    planes: Annotated[tuple[str, ...], MaxLen(16)] = ()
    shm: SharedPool | None = None  # of a decode node that offers the plane shm
    cuda: CudaPool | None = None  # of a decode node that offers the plane cuda-ipc
    verify_pages: bool = False  # of nodes: pages are sent, and wanted, with checksums
    listen: str | None = None  # where a prefill node waits for decode nodes
    capacity_tokens: int = 0  # what the pool holds: the longest prompt + answer
    prefill_budget_tokens: int = 0  # of a prefill node: D grants no more than twice this ahead of it


@dataclass(frozen=True, slots=True)
class HelloAck:
    """Answer to Hello: the same about me, and whether the link is up."""

    hello: Hello
    accepted: bool
    reason: str = ""  # of a refusal, with both values named
    plane: str = ""  # the plane chosen from the ones offered


@dataclass(frozen=True, slots=True)
class Status:
    """Once a second both ways. It never declares death; it finds what was lost (see `reconcile.py`)."""

    last_seq_seen: int  # filled in by the link
    open_ids: Annotated[tuple[int, ...], MaxLen(100_000)]  # requests or transfers of this link alive here
    queued: int = 0
    running: int = 0
    steps: int = 0  # batches computed since start
    usable: bool = False  # of a decode node: it can take a request now
    out_of_pages: bool = False  # of a decode node: the first that waits there waits for pages, not for a node
    draining: bool = False  # of a node: it takes no new work, and leaves when it has done what it has
    total_bytes: int = 0  # P: KV bytes sent on this link; D: bytes it may send in all
    sent_s: Seconds = 0.0  # these three: see `clock.py`, which fills them in
    echo_s: Seconds | None = None  # `sent_s` of the reader's last one; None: none has come
    echo_came_s: Seconds = 0.0  # when that came, by the sender's clock


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a request (gateway -> D) or a transfer (D -> P), in whatever state it is."""

    id: _Id


@dataclass(frozen=True, slots=True)
class Failed:
    """A request (D -> gateway) or a transfer (P -> D) ended with an error. From P: it writes no more."""

    id: _Id
    status: _HttpStatus
    reason: str
    retry_after_s: int | None = None


# --- gateway and nodes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for D to own. Each of several choices is one: their ids are `request_id` and the next."""

    request_id: _FirstId
    sampling: SamplingParams
    prompt_ids: Int32s = field(default_factory=int32s)
    timeout_ms: _TimeoutMs | None = None  # from D's receipt on, by D's clock; then it ends with 504


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A prefill node that decode nodes may use."""

    node_id: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Peers:
    """All prefill nodes that are there now; replaces the list before."""

    prefills: Annotated[tuple[PeerInfo, ...], MaxLen(1024)]


@dataclass(frozen=True, slots=True)
class Granted:
    """These choices of a prompt have pages and, unless D computes it, a prefill node.

    For those who watch: nothing follows from it. Said again when a transfer is tried again. All times that D
    says are of its own clock.
    """

    request_ids: Annotated[tuple[_Id, ...], MaxLen(128)]
    prefill_node: str | None  # None: D computes the prompt
    queued_s: Seconds
    granted_s: Seconds


@dataclass(frozen=True, slots=True)
class Begun:
    """How the choices of a prompt came to their first tokens."""

    granted: Granted
    prefill: PrefillStamps
    arrived_s: Seconds


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's last news."""

    request_id: _Id
    reason: FinishReason
    prebuilt_s: Seconds | None = None  # it joined the running batch
    second_token_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log probabilities of a request's tokens in a `Tokens` message, one each."""

    request_id: _Id
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A step's tokens for all requests of a gateway: request i got `counts[i]` tokens from index `first[i]`.

    `token_ids` holds them one request after the other. A gap in a request's indices means that something was
    lost: the gateway fails the request.
    """

    request_ids: tuple[_Id, ...]
    finished: tuple[Finish, ...]
    first: Int32s = field(default_factory=int32s)
    counts: Int32s = field(default_factory=int32s)
    token_ids: Int32s = field(default_factory=int32s)
    logprobs: tuple[RequestLogprobs, ...] = ()  # of the requests that asked for them
    begun: tuple[Begun, ...] = ()  # of the prompts whose first tokens are here

    def __post_init__(self) -> None:
        """Check what relates the fields (the codec turns it into a RemoteProtocolError)."""
        if not len(self.request_ids) == len(self.first) == len(self.counts):
            raise ValueError("request_ids, first and counts differ in length")
        if any(count < 0 for count in self.counts) or sum(self.counts) != len(self.token_ids):
            raise ValueError("counts do not add up to token_ids")
        counts = dict(zip(self.request_ids, self.counts, strict=True))
        if any(counts.get(item.request_id) != len(item.tokens) for item in self.logprobs):
            raise ValueError("logprobs do not match counts")


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt: of every token but the first, right before the first `Tokens`."""

    request_id: _Id
    logprobs: Float32s = field(default_factory=float32s)
    top_ids: Int32s = field(default_factory=int32s)  # a token as many as were asked for, likeliest first
    top_logprobs: Float32s = field(default_factory=float32s)


@dataclass(frozen=True, slots=True)
class Refused:
    """D does not take a request; the gateway turns it into an error object."""

    request_id: _Id
    status: _HttpStatus
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Ask a node for its ledger and counters, now."""

    query_id: _Id


@dataclass(frozen=True, slots=True)
class PageLedger:
    """Pages by state; the states add up to `total`, which leaves out the padding page."""

    total: int
    free: int = 0
    active: int = 0
    cached: int = 0
    incoming: int = 0
    outgoing: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A node's ledger and counters at the moment of asking."""

    query_id: _Id
    pages: PageLedger
    counters: dict[str, int]


# --- decode node and prefill node ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this prompt, send its KV into these pages of mine, and sample the first token."""

    transfer_id: _Id
    sampling: SamplingParams
    prompt_ids: Int32s = field(default_factory=int32s)
    page_ids: Int32s = field(default_factory=int32s)


@dataclass(frozen=True, slots=True)
class Credit:
    """D's limit on all KV bytes of this link, ever: absolute, so that a lost one heals with the next."""

    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """P cannot take a transfer at all; it writes nothing."""

    transfer_id: _Id
    status: _HttpStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages `first_page` .. `first_page + num_pages` of a transfer, by logical index, and their bytes.

    The frames joined are [layers, num_pages, 2, page_size, kv_heads, head_dim] of the link's layout.
    """

    transfer_id: _Id
    first_page: int
    num_pages: Annotated[int, Range(1, 2**31 - 1)]
    total_bytes: int  # KV bytes sent on this link so far, these included
    checksums: Annotated[tuple[_U64, ...], MaxLen(MAX_FRAMES)] = ()  # one a page; none when not verified
    frames: Annotated[tuple[Buffer, ...], Frames()] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The first token of one choice and whether it ends it."""

    first_token: Annotated[int, Range(0, 2**31 - 1)]
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The hand-over: everything was sent, here are the first tokens, one a choice. P forgets the transfer."""

    transfer_id: _Id
    num_pages: int
    stamps: PrefillStamps  # of P's clock
    choices: Annotated[tuple[Choice, ...], MaxLen(128)]
    # Of the prompt's tokens but the first, where they were asked for; see `PromptLogprobs`.
    prompt_logprobs: Float32s = field(default_factory=float32s)
    prompt_top_ids: Int32s = field(default_factory=int32s)
    prompt_top_logprobs: Float32s = field(default_factory=float32s)

    def logprob_arrays(self) -> LogprobArrays:
        """Those of the prompt."""
        return LogprobArrays(self.prompt_logprobs, self.prompt_top_ids, self.prompt_top_logprobs)


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Answer to Abort, for a known transfer or not: P writes no more."""

    transfer_id: _Id


MESSAGES: tuple[type, ...] = (
    Hello,
    HelloAck,
    Status,
    Abort,
    Failed,
    Submit,
    Peers,
    Granted,
    PromptLogprobs,
    Tokens,
    Refused,
    StatsRequest,
    Stats,
    Prefill,
    Credit,
    Rejected,
    Chunk,
    Commit,
    Quiesced,
)

CODEC = Codec(MESSAGES)
