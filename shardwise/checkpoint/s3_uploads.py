"""S3's own way of a large object: parts, each sent and tried by itself, and one completion that makes it seen."""

import contextlib
import errno
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

PARTS_AT_ONCE = 4
# Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MOST_PARTS = 10_000
_UNFINISHED = re.compile(r"^\.(?P<name>[^~/]+)~(?P<id>.+)\.upload$")

Tried = Callable[[Callable[[], Any]], Any]
"""Makes a request, again where its error passes by itself."""


class S3Uploads:
    """Uploads in parts through s3fs (`system`). A path is bucket/key."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def write(self, path: str, parts: Iterable[bytes], tried: Tried) -> None:
        """All parts, then their completion; on any failure they are dropped, and nothing is to be seen."""
        target = _target(path)
        made = tried(lambda: self._system.call_s3("create_multipart_upload", **target))
        upload = str(made["UploadId"])
        try:
            tags, size = self._sent({**target, "UploadId": upload}, parts, tried)
            tried(lambda: self._complete(path, upload, tags, size))
        except BaseException:
            # What cannot be dropped now is listed, and goes with its folder.
            with contextlib.suppress(Exception):
                self.drop(path, upload)
            raise

    def _sent(self, target: dict[str, str], parts: Iterable[bytes], tried: Tried) -> tuple[list[str], int]:
        """Each part's tag, and the bytes of all; a few are on their way at once."""
        tags: list[str] = []
        size = 0
        on_their_way: deque[Future[str]] = deque()

        def send(number: int, data: bytes) -> str:
            given = {**target, "PartNumber": number, "Body": data}
            return str(tried(lambda: self._system.call_s3("upload_part", **given))["ETag"])

        with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            for number, data in enumerate(parts, start=1):
                if number > MOST_PARTS:
                    raise OSError(errno.EFBIG, f"more than {MOST_PARTS} parts of {len(data)} bytes")
                if len(on_their_way) == PARTS_AT_ONCE:
                    tags.append(on_their_way.popleft().result())
                on_their_way.append(pool.submit(send, number, data))
                size += len(data)
            tags += [future.result() for future in on_their_way]
        return tags, size

    def _complete(self, path: str, upload: str, tags: list[str], size: int) -> None:
        named = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        try:
            self._system.call_s3(
                "complete_multipart_upload", **_target(path), UploadId=upload, MultipartUpload={"Parts": named}
            )
        except FileNotFoundError:
            # The upload is gone: dropped, or completed by a try whose answer was lost.
            if int(self._system.info(path)["size"]) != size:
                raise

    def drop(self, path: str, upload: str) -> None:
        """An upload that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._system.call_s3("abort_multipart_upload", **_target(path), UploadId=upload)

    def unfinished(self, folder: str) -> Iterator[str]:
        """What nobody completed below a folder, as paths that `parsed` reads: no listing shows it, and it costs."""
        bucket, prefix = _target(f"{folder}/").values()
        asked = {"Bucket": bucket, "Prefix": prefix}
        while True:
            answer = self._system.call_s3("list_multipart_uploads", **asked)
            for item in answer.get("Uploads", ()):
                path = PurePosixPath(f"{bucket}/{item['Key']}")
                yield str(path.with_name(f".{path.name}~{item['UploadId']}.upload"))
            if not answer.get("IsTruncated"):
                return
            asked |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def parsed(path: str) -> tuple[str, str] | None:
    """The object's path and the upload of one that `unfinished` gave; None for any other path."""
    pure = PurePosixPath(path)
    match = _UNFINISHED.match(pure.name)
    return (str(pure.with_name(match["name"])), match["id"]) if match else None


def _target(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}
