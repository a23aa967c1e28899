"""Compile grammars beside a node's loop: each once, in threads, and within bounds.

The loop asks and goes on; a descriptor is readable when there is an answer. What a grammar costs is its
author's choice, so it is tried before it is taken: compiling and a walk of some tokens have a bound each, in
CPU time of their thread, which a busy machine does not change. A thread cannot be stopped: one that is over
its time is left to itself, and with some of those no other grammar is compiled. The model's tokenizer is
loaded with the first grammar. Knows no request and no row.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common.request import Grammar, GrammarKind

MAX_THREADS = 2
MAX_LOST = 2  # threads over their time, until one of them ends
MAX_WAITING = 64  # grammars; who needs another one asks again
COMPILE_CPU_S = 10.0
STEP_CPU_S = 0.05  # of a token, in the walk
WALK_TOKENS = 32
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20
MAX_GRAMMAR_BYTES = 64 << 20  # of one, compiled: requests that wait or run hold theirs beside the cache
MAX_WHITESPACE = 16  # characters between two tokens of JSON: a weak model would write them without an end
K = TypeVar("K")
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True, slots=True)
class GrammarRefusal:
    """Why there is no such grammar, by HTTP status."""

    status: int
    reason: str


@dataclass(eq=False, slots=True)
class _Job:
    """A grammar and its thread, which alone sets what is behind `thread`."""

    grammar: Grammar
    thread: threading.Thread = field(init=False)
    started: bool = False  # the tokenizer is there: its time counts
    result: Any = None

    def cpu_s(self) -> float:
        """CPU time of the thread; 0 when it has ended."""
        try:
            with open(f"/proc/self/task/{self.thread.native_id}/stat", "rb") as stat:
                ticks = stat.read().rpartition(b")")[2].split()[11:13]
        except OSError:
            return 0.0
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class GrammarCompiler:
    """The grammars of one model.

    Args:
        folder: of the model; its tokenizer is read with the first grammar.
        vocab_size: the model's.
        eos_token_ids: as the model's configuration says; they end an answer, and nothing else does.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: Any = None  # xgrammar.TokenizerInfo
        self._lock = threading.Lock()  # around its making
        self._cache: OrderedDict[Grammar, Any] = OrderedDict()  # compiled, or why not
        self._waiting: deque[Grammar] = deque()
        self._jobs: dict[Grammar, _Job] = {}
        self._lost: list[_Job] = []
        self._fd: int | None = None  # made with the first grammar

    def compile(self, grammar: Grammar) -> Any | GrammarRefusal | None:
        """Return the compiled grammar (for GrammarStates), why there is none, or None: ask again later."""
        if grammar in self._cache:
            self._cache.move_to_end(grammar)
            return self._cache[grammar]
        if grammar in self._jobs or grammar in self._waiting:
            return None
        if not self._eos_token_ids:
            return GrammarRefusal(400, "this model has no end-of-sequence token: a grammar could not end")
        self._lost = [job for job in self._lost if job.thread.is_alive()]
        if len(self._lost) >= MAX_LOST:
            return GrammarRefusal(503, "too many grammars are being compiled")
        if len(self._waiting) >= MAX_WAITING:
            return None
        if self._fd is None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting.append(grammar)
        self._start()
        return None

    def pollables(self) -> list[int]:
        """What gets readable when there is an answer."""
        return [] if self._fd is None else [self._fd]

    def answers(self, waiting: Sequence[tuple[K, Grammar]]) -> Iterator[tuple[K, Any]]:
        """Compile what is waited for; give what is compiled, or refused. For every turn of a loop."""
        self.collect()
        for key, grammar in waiting:
            if (answer := self.compile(grammar)) is not None:
                yield key, answer

    def collect(self) -> None:
        """Take what is done, give up what takes too long, and start what waits; once a second, or oftener."""
        if self._fd is None:
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for job in list(self._jobs.values()):
            if job.result is not None:
                self._finish(job, job.result)
            elif job.started and job.cpu_s() > COMPILE_CPU_S:
                self._lost.append(job)
                reason = f"the grammar is too large: it is not compiled within {COMPILE_CPU_S:g} s"
                self._finish(job, GrammarRefusal(400, reason))
        self._start()

    def _start(self) -> None:
        if sum(job.thread.is_alive() for job in self._lost) >= MAX_LOST:
            self._waiting.clear()  # who waits for them asks again, and is refused
        while self._waiting and len(self._jobs) < MAX_THREADS:
            job = _Job(self._waiting.popleft())
            job.thread = threading.Thread(target=self._run, args=(job,), name="grammar", daemon=True)
            self._jobs[job.grammar] = job
            job.thread.start()

    def _finish(self, job: _Job, result: Any) -> None:
        del self._jobs[job.grammar]
        self._cache[job.grammar] = result
        while len(self._cache) > MAX_CACHED or self._cached_bytes() > MAX_CACHED_BYTES:
            if self._cache.popitem(last=False)[0] is job.grammar:
                self._cache[job.grammar] = result  # whoever asked for it will ask once more
                break

    def _cached_bytes(self) -> int:
        return sum(getattr(each, "memory_size_bytes", 0) for each in self._cache.values())

    # In a thread ------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        try:
            with self._lock:
                self._load_tokenizer()
            job.started = True
            compiled = _compile(job.grammar, self._tokenizer)
            if compiled.memory_size_bytes > MAX_GRAMMAR_BYTES:
                raise ValueError(f"the grammar is too large: {compiled.memory_size_bytes} bytes compiled")
            _walk(compiled, self._vocab_size)
            job.result = compiled
        except (MemoryError, OSError, ImportError) as error:
            job.result = GrammarRefusal(500, f"no grammar can be compiled: {type(error).__name__}")
        except Exception as error:  # whatever a client's text leads to is the client's
            reason = " ".join(_ORIGIN.sub("", str(error)).split()) or type(error).__name__
            job.result = GrammarRefusal(400, reason[:500])
        assert self._fd is not None
        os.eventfd_write(self._fd, 1)

    def _load_tokenizer(self) -> None:
        if self._tokenizer is not None:
            return
        from transformers import AutoTokenizer
        from xgrammar import TokenizerInfo, VocabType

        if not (self._folder / "tokenizer.json").exists():
            raise ValueError("this model has no tokenizer: its answers have no text")
        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        stops = list(self._eos_token_ids)
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops)
        vocab = list(info.decoded_vocab)
        # Special tokens have no text in an answer, so they match nothing.
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and token_id < len(vocab):
                vocab[token_id] = b""
        self._tokenizer = TokenizerInfo(
            vocab,
            VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=stops,
            add_prefix_space=info.add_prefix_space,
        )


def _compile(grammar: Grammar, tokenizer: Any) -> Any:
    """Compile, in this thread.

    Raises:
        Exception: it is no grammar; the text says why.
    """
    from xgrammar import GrammarCompiler as Compiler

    compiler = Compiler(tokenizer, max_threads=1, cache_enabled=False)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            json.loads(grammar.text)  # says more than the compiler, and bounds the depth
            return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
        case GrammarKind.REGEX:
            return compiler.compile_regex(grammar.text)
        case GrammarKind.EBNF:
            return compiler.compile_grammar(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            json.loads(grammar.text)
            return compiler.compile_structural_tag(grammar.text)


def _walk(compiled: Any, vocab_size: int) -> None:
    """Draw some tokens that the grammar allows, as a model would: each must be cheap.

    Raises:
        ValueError: one was not; the loop of a node would stand still.
    """
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    draw = random.Random(0)
    matcher = GrammarMatcher(compiled)
    mask = allocate_token_bitmask(1, vocab_size)
    for count in range(WALK_TOKENS):
        started_s = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        filled_s = time.thread_time()
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            raise ValueError(f"the grammar leads nowhere: no token of the model goes on after {count}")
        picked_s = time.thread_time()
        matcher.accept_token(int(draw.choice(allowed)))
        step_s = filled_s - started_s + time.thread_time() - picked_s
        if step_s > STEP_CPU_S:
            raise ValueError(
                f"the grammar is too ambiguous: its token {count} takes {step_s * 1000:.0f} ms, more than "
                f"{STEP_CPU_S * 1000:.0f}"
            )
        if matcher.is_terminated():
            matcher.reset()
