"""The objects of a scratch run's own store: files of a folder behind S3's requests. Whole or absent, as S3's.

It answers what s3fs asks for and no more.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

import contextlib
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.sax.saxutils import escape

BUCKET = "scratch"


class Request(NamedTuple):
    """One of S3's. `key`: below the bucket; "" for the bucket itself."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Objects:
    """The bucket: a key is a file below `root`. What is on its way lies beside it and is moved there whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._arriving = root.with_name(f"{root.name}.arriving")
        self._uploads: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, asked: Request) -> Answer:
        if "uploads" in asked.query or "uploadId" in asked.query:
            return self._upload(asked)
        if not asked.key:
            return self._list(asked.query) if asked.method == "GET" else Answer(200)
        path = self._path(asked.key)
        if path is None:
            return error(400, "InvalidURI")
        if asked.method == "PUT":
            return self._put(path, asked.body, new="if-none-match" in asked.headers)
        if asked.method == "DELETE":
            self._delete(path)
            return Answer(204)
        try:
            return self._get(path, asked)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return error(404, "NoSuchKey")

    def _path(self, key: str) -> Path | None:
        pure = PurePosixPath(key)
        return None if pure.is_absolute() or ".." in pure.parts else self.root / pure

    def _put(self, path: Path, body: bytes, *, new: bool = False) -> Answer:
        self._arriving.mkdir(parents=True, exist_ok=True)
        arriving = self._arriving / secrets.token_hex(8)
        arriving.write_bytes(body)
        with self._lock:  # a folder may be deleted with its last key meanwhile
            path.parent.mkdir(parents=True, exist_ok=True)
            if new and path.exists():
                arriving.unlink()
                return error(412, "PreconditionFailed")
            arriving.replace(path)
        return Answer(200, headers=(("ETag", _tag(body)),))

    def _delete(self, path: Path) -> None:
        with self._lock:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds other keys
                if path.parent != self.root:
                    path.parent.rmdir()

    def _get(self, path: Path, asked: Request) -> Answer:
        data, about = path.read_bytes(), (*_dated(path), ("Accept-Ranges", "bytes"))
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("range", ""))
        if found is None:
            return Answer(200, data, about)
        start, end = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return error(416, "InvalidRange")
        return Answer(206, data[start:end], (*about, ("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")))

    def _list(self, query: Mapping[str, str]) -> Answer:
        """All keys with a prefix, or what stands before the next delimiter; a page at a time."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most, after = int(query.get("max-keys", "1000")), query.get("continuation-token", query.get("start-after", ""))
        names = dict[str, bool]()  # whether it stands for several
        for key in self._keys(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            names[f"{prefix}{head}{found}" if found else key] = bool(found)
        left = [name for name in sorted(names) if name > after]
        body = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" if names[name] else self._entry(name)
            for name in left[:most]
        )
        more = len(left) > most
        token = f"<NextContinuationToken>{escape(left[most - 1])}</NextContinuationToken>" if more else ""
        said = f"<Name>{BUCKET}</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
        return _xml("ListBucketResult", f"{said}{token}{body}")

    def _keys(self, prefix: str) -> Iterator[str]:
        for folder, _, names in os.walk(self.root / prefix.rpartition("/")[0]):
            for name in names:
                key = (Path(folder) / name).relative_to(self.root).as_posix()
                if key.startswith(prefix):
                    yield key

    def _entry(self, key: str) -> str:
        try:
            about = (self.root / key).stat()
        except FileNotFoundError:
            return ""  # deleted meanwhile
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(about.st_mtime))
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
            f"<Size>{about.st_size}</Size></Contents>"
        )

    def _upload(self, asked: Request) -> Answer:
        """In parts: begun, sent, completed or dropped."""
        upload = asked.query.get("uploadId", "")
        if not upload and asked.method == "GET":
            found = [f"<Upload><Key>{escape(k)}</Key><UploadId>{u}</UploadId></Upload>" for u, k in self._open(asked)]
            return _xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{''.join(found)}")
        if not upload:
            upload = secrets.token_hex(8)
            self._uploads[upload] = asked.key
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        folder, path = self._arriving / upload, self._path(asked.key)
        if self._uploads.get(upload) != asked.key or path is None:
            return error(404, "NoSuchUpload")
        if asked.method == "PUT":
            return self._put(folder / f"{int(asked.query['partNumber']):05d}", asked.body)
        if asked.method == "POST":
            numbers = re.findall(rb"<PartNumber>(\d+)</PartNumber>", asked.body)
            self._put(path, b"".join((folder / f"{int(number):05d}").read_bytes() for number in numbers))
        self._drop(upload, folder)
        tag = f"<ETag>{escape(_tag(upload.encode()))}</ETag>"
        return _xml("CompleteMultipartUploadResult", tag) if asked.method == "POST" else Answer(204)

    def _open(self, asked: Request) -> list[tuple[str, str]]:
        prefix = asked.query.get("prefix", "")
        return [(upload, key) for upload, key in list(self._uploads.items()) if key.startswith(prefix)]

    def _drop(self, upload: str, folder: Path) -> None:
        self._uploads.pop(upload, None)
        for part in folder.glob("*") if folder.is_dir() else ():
            part.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def error(status: int, code: str) -> Answer:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)


def _xml(name: str, inside: str, status: int = 200) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{inside}</{name}>'.encode()
    return Answer(status, body, (("Content-Type", "application/xml"),))


def _dated(path: Path) -> Sequence[tuple[str, str]]:
    about = path.stat()
    return (
        ("Last-Modified", formatdate(about.st_mtime, usegmt=True)),
        ("ETag", f'"{about.st_mtime_ns:x}-{about.st_size:x}"'),
    )


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
