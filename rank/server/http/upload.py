"""An upload as a multipart form (RFC 7578), written to the disk while it comes."""

from __future__ import annotations

import os
import threading
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..api_error import ApiError, bad
from ..blocking import begin_on_disk, on_disk
from ..decoding import show
from ..file_store import MAX_FILE, FileStore, StoredFile, cannot_write

GATHER = 1 << 20  # bytes that are written together
MAX_FIELD = 1 << 10  # of a field that is no file
MAX_PARTS = 16
PURPOSES = ("batch",)


class Upload:
    """One request's form. What is wrong with it is raised by `finish`: until then the rest is read and dropped."""

    def __init__(self, content_type: str, store: FileStore, owner: str):
        self._store = store
        self._owner = owner
        self._gathered: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._file: StoredFile | None = None
        self._out: IO[bytes] | None = None
        self._size_of_file = 0
        self._fields: dict[str, bytes] = {}
        self._parts = 0
        self._header = self._value = b""
        self._disposition: dict[bytes, bytes] = {}
        self._whole = False
        self._closed = False
        self._busy = threading.Lock()  # held by the thread that parses, and by whoever removes the file
        kind, options = parse_options_header(content_type)
        self._parser: MultipartParser | None = None
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            self._error = ApiError(
                415,
                f"the request's Content-Type is {content_type[:100] or 'missing'}: a file is sent as "
                "multipart/form-data, with the fields purpose and file",
            )
            return
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": self._content,
                "on_end": self._end,
            },
        )

    async def write(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        if self._error is None:
            self._gathered.append(chunk)
            self._size += len(chunk)
            if self._size >= GATHER:
                await self._flush()

    async def _flush(self) -> None:
        data, self._size = b"".join(self._gathered), 0
        self._gathered.clear()
        await on_disk(self._parse, data)

    def _parse(self, data: bytes) -> None:
        with self._busy:
            try:
                if not self._closed:
                    self._write(data)
            except FormParserError as error:
                self._error = ApiError(400, f"the request's body is no multipart form: {error}")
            except (ApiError, OSError, ValueError) as error:
                self._error = error

    def _write(self, data: bytes) -> None:
        """The file is open only meanwhile: uploads may be many and slow, and descriptors are few."""
        assert self._parser is not None
        try:
            self._parser.write(data)
        finally:
            out, self._out = self._out, None
            if out is not None:
                out.close()  # writes what is buffered

    async def finish(self) -> StoredFile:
        """The file, which is in the store now. Raises ApiError."""
        if self._error is None:
            await self._flush()
        if self._error is None:
            self._check()
        if self._error is None:
            await on_disk(self._keep)
        if self._error is not None:
            self._closed = True
            await on_disk(self._remove)
            raise cannot_write("file", self._error) if isinstance(self._error, OSError) else self._error
        file, self._file = self._file, None
        assert file is not None
        return file

    def _keep(self) -> None:
        with self._busy:
            try:
                if self._file is not None:  # not given up meanwhile
                    self._store.add(self._file)
            except OSError as error:
                self._error = error

    def _check(self) -> None:
        purpose = self._fields.get("purpose", b"").decode(errors="replace")
        if not self._whole:
            self._error = ApiError(400, "the request's body is no whole multipart form: it is cut off")
        elif self._file is None:
            self._error = bad("file", "file is missing: the form needs a part of this name, with a file's name")
        elif not purpose:
            self._error = bad("purpose", f"purpose is missing: expected {', '.join(PURPOSES)}")
        elif purpose not in PURPOSES:
            self._error = bad("purpose", f"purpose is {show(purpose)}: expected {', '.join(PURPOSES)}")
        elif strange := next((name for name in self._fields if name != "purpose"), ""):
            self._error = bad(strange, f"{strange[:100]} is not supported: files stay until they are deleted")

    def close(self) -> None:
        """The request is over; what was not finished is removed, in a thread."""
        if not self._closed:
            self._closed = True
            self._error = self._error or ApiError(400, "the upload was given up")
            if self._file is not None or self._busy.locked():
                begin_on_disk(self._remove)

    def _remove(self) -> None:
        with self._busy:  # not before the thread that may write it
            if self._file is not None:
                self._store.drop(self._file)
                self._file = None

    # The parser's calls, in a thread of the disk's pool.

    def _begin_part(self) -> None:
        self._disposition, self._header, self._value = {}, b"", b""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ApiError(400, f"the form has more than {MAX_PARTS} parts: purpose and file are expected")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = parse_options_header(self._value)[1]
        self._header = self._value = b""

    @property
    def _name(self) -> str:
        return self._disposition.get(b"name", b"").decode(errors="replace")

    def _begin_content(self) -> None:
        if self._name != "file":
            self._fields[self._name] = b""
            return
        if self._file is not None:
            raise bad("file", "file is there twice: send one file in a request")
        filename = self._disposition.get(b"filename", b"").decode(errors="replace")
        self._file = self._store.new(os.path.basename(filename)[:255] or "file", "batch", self._owner)
        self._open(self._file)

    def _content(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            self._fields[self._name] += data[start:end]
            if len(self._fields[self._name]) > MAX_FIELD:
                raise bad(self._name, f"{self._name[:100]} is longer than {MAX_FIELD} bytes")
            return
        assert self._file is not None
        out = self._out or self._open(self._file)
        self._size_of_file += end - start
        if self._size_of_file > MAX_FILE:
            raise ApiError(413, f"the file is larger than the limit of {MAX_FILE >> 20} MiB", code="too_large")
        self._store.grow(self._file, end - start)
        out.write(data[start:end])

    def _open(self, file: StoredFile) -> IO[bytes]:
        self._out = open(self._store.path(file), "ab", opener=_private)  # noqa: SIM115
        return self._out

    def _end(self) -> None:
        self._whole = True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
