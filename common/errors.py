"""Every exception that Baton raises on purpose.

    BatonError
    ├── ConfigError            an option, a model folder or this machine does not fit: one line, exit status 2
    ├── RequestRejected        the client can mend it, or come back later: becomes an OpenAI error object
    ├── LocalError             our bug: crash loudly
    │   ├── InvariantError     a pool, a ledger or a batch contradicts itself
    │   └── LocalProtocolError we broke a transition table of our own
    └── RemoteError            the peer's fault: fail the transfer or the link, never the process
        └── RemoteProtocolError bytes that are no message, or a message that its state does not allow
            └── OtherVersion    a message of another version of the protocol

Lack of capacity is a value (None, False), never an exception.
"""

from __future__ import annotations


class BatonError(Exception):
    """Base of the tree."""


class ConfigError(BatonError):
    """A setting cannot work here. The text is one line that says what to change."""


class RequestRejected(BatonError):
    """A request that is answered with an OpenAI error object.

    Args:
        message: what is wrong, for a person.
        status: HTTP status.
        code: OpenAI's `error.code` (for example `model_not_found`), or None.
        param: the field of the request that is wrong, or None.
        retry_after_s: for 429 and 503, when to come back.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class LocalError(BatonError):
    """Our own bug."""


class InvariantError(LocalError):
    """Something that is always true is not."""


class LocalProtocolError(LocalError):
    """We tried a step that our own transition table does not have."""


class RemoteError(BatonError):
    """The peer's fault."""


class RemoteProtocolError(RemoteError):
    """The peer sent something that is not a message, or not one for this state."""


class OtherVersion(RemoteProtocolError):
    """The peer speaks another version of the protocol; the text names both."""
