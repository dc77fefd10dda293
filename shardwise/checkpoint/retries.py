"""Which errors of a network pass by themselves, and how long to wait before trying again. Pure."""

import errno
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Of HTTP: too slow, a rival's conditional write, too many requests; and every 5xx. Source: RFC 9110, RFC 6585, and
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (409 ConditionalRequestConflict, 503 SlowDown).
_PASSING_STATUS = frozenset({408, 409, 425, 429})
_PASSING_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "InternalError",
     "ServiceUnavailable", "OperationAborted", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
)  # fmt: skip
_PASSING_NUMBERS = frozenset(
    {errno.EBUSY, errno.EREMOTEIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
     errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
)  # fmt: skip
# Of the HTTP clients below fsspec, by name since they are not always installed: no connection, one that broke, an
# answer cut short or garbled.
_PASSING_KINDS = frozenset(
    {"HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError", "IncompleteRead",
     "ClientConnectionError", "ClientPayloadError", "FSTimeoutError", "FlexibleChecksumError"}
)  # fmt: skip


# A generator of its own: the global one is the user's, and a further try must not change what is trained.
_DRAWS = random.Random()


class Retries(NamedTuple):
    """At most `tries` in all; the n-th wait is half to all of first_seconds * 2^n, and at most most_seconds."""

    tries: int = 8
    first_seconds: float = 0.2
    most_seconds: float = 10.0

    def waits(self, draw: Callable[[], float] = _DRAWS.random) -> Iterator[float]:
        """Seconds before each further try; `draw` gives 0 to 1, so that ranks do not come back in step.

        Source: exponential backoff with equal jitter, M. Brooker, AWS Architecture Blog, 2015.
        """
        for number in range(self.tries - 1):
            whole = min(self.first_seconds * 2**number, self.most_seconds)
            yield whole * (0.5 + draw() / 2)


def passes(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS or code_of(error) in _PASSING_CODES
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    return any(
        isinstance(one, TimeoutError | ConnectionError)
        or (isinstance(one, OSError) and one.errno in _PASSING_NUMBERS)
        or any(kind.__name__ in _PASSING_KINDS for kind in type(one).__mro__)
        for one in _chain(error)
    )


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error; None where no answer came."""
    for one in _chain(error):
        status = _answer(one).get("ResponseMetadata", {}).get("HTTPStatusCode", getattr(one, "status", None))
        if isinstance(status, int):
            return status
    return None


def code_of(error: BaseException) -> str:
    """The provider's own code ("SlowDown"); "" where there is none."""
    return next((code for one in _chain(error) if (code := str(_answer(one).get("Error", {}).get("Code", "")))), "")


def _answer(error: BaseException) -> dict[str, dict[str, object]]:
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else {}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
