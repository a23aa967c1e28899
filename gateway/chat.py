"""Chat with a running server in the terminal, or through a pipe, one line a question.

1. Read a line: /exit or the end of the input ends the chat, /clear forgets it, an empty line is nothing.
2. Ask with everything that was said before, and show the answer as it comes.
3. Ctrl-C breaks an answer off: the server sees the broken connection and stops computing. What was shown of
   it stays part of the chat.
4. A question that ended in an error is forgotten, so that it can be asked again.

In a pipe there is nobody to go on after Ctrl-C or an error: both end the chat.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

from common.config import ChatConfig, ClientConfig
from gateway.api_client import AskFailed, connect, request, served_model, stream, text_of

PROMPT = "> "


class Chat:
    """What was said so far, and the server that answers."""

    def __init__(self, client: ClientConfig, config: ChatConfig) -> None:
        self._client = client
        self._opening = [_said("system", config.system)] if config.system else []
        self._messages = [*self._opening]

    def clear(self) -> None:
        """Forget what was said, but not the system prompt."""
        self._messages = [*self._opening]

    def ask(self, text: str) -> None:
        """Write the answer to stdout, and remember both.

        Raises:
            AskFailed: there is no whole answer.
            KeyboardInterrupt: it was broken off.
        """
        question = _said("user", text)
        answer = ""
        try:
            with connect(self._client) as server:
                body = request(self._client, served_model(server))
                body |= {"messages": [*self._messages, question]}
                for event in stream(server, "/v1/chat/completions", body):
                    piece = text_of(event)
                    answer += piece
                    _write(piece)
        except AskFailed:
            if answer:
                _write("\n")
            raise
        except KeyboardInterrupt:
            _write("\n")
            if answer:
                self._messages += [question, _said("assistant", answer)]
            raise
        _write("\n")
        self._messages += [question, _said("assistant", answer)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _read_piped() -> str | None:
    return sys.stdin.readline() or None


def _read_typed() -> str | None:
    while True:
        try:
            return input(PROMPT if sys.stdout.isatty() else "")
        except EOFError:
            _write("\n")
            return None
        except KeyboardInterrupt:
            _write("\n")  # gives the line up, not the chat


def chat(client: ClientConfig, config: ChatConfig) -> None:
    """Chat until the input ends.

    Raises:
        AskFailed: the server cannot be reached or, in a pipe, did not answer.
        KeyboardInterrupt: in a pipe.
    """
    is_typed = sys.stdin.isatty()
    for file in (sys.stdin, sys.stdout):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")  # what is no text here must not end the chat
    if is_typed:
        with contextlib.suppress(ImportError):  # some Pythons are built without it
            importlib.import_module("readline")  # `input` edits lines and knows the ones before
        with connect(client) as server:
            _write(f"{served_model(server)}: Ctrl-C stops an answer, /clear starts anew, /exit ends\n")
    conversation = Chat(client, config)
    while (line := _read_typed() if is_typed else _read_piped()) is not None:
        match line.strip():
            case "":
                pass
            case "/exit":
                return
            case "/clear":
                conversation.clear()
            case text:
                _answer(conversation, text, is_typed=is_typed)


def _answer(conversation: Chat, text: str, *, is_typed: bool) -> None:
    try:
        conversation.ask(text)
    except AskFailed as error:
        if not is_typed:
            raise
        sys.stderr.write(f"baton: {error}\n")
    except KeyboardInterrupt:
        if not is_typed:
            raise
