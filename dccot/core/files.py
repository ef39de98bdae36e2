"""Reads and writes JSON lines: reading survives any file, writing survives any crash.

    for line, row in read_jsonl(path): …            bad lines are reported as path:line and skipped; strict=True raises
    with JsonlWriter(path) as out: out.write(row)   one row = one write; an earlier run's partial last line is removed
    write_jsonl_atomic(path, rows)                  the whole file or nothing

A file whose name ends with .gz is read and written compressed (not by JsonlWriter, which appends).
Bad means: not UTF-8, not JSON, not an object, or longer than `MAX_LINE_BYTES`. An over-long line is never held in
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_LINE_BYTES = 8 << 20  # a rollout of 100,000 tokens with log-probs takes about 3 MB
LEASE_SECONDS = 120.0  # after which a file server releases the locks of a dead machine; NFSv4 does after 90
GZIP_LEVEL = 1  # a training step waits for it; higher ones gain little on digits
REPORTED_LINES = 3  # a file that is bad throughout does not flood the terminal


class BadData(ValueError):
    """An unusable file; the message names file, line and remedy."""


class JsonlReader:
    """(line number, row) of every good line; blank ones are ignored. `skipped` counts the bad ones met so far."""

    def __init__(self, path: str | Path, *, strict: bool = False, report: Callable[[str], None] = print):
        self.path, self.strict, self.report, self.skipped = Path(path), strict, report, 0

    def __iter__(self) -> Iterator[tuple[int, dict]]:
        with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
            if not self.path.stat().st_size:
                self._bad(f"{self.path}: the file is empty")
            for number, raw in enumerate(self._lines(file), start=1):
                row, fault = _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                if fault:
                    self.skipped += 1
                    self._bad(f"{self.path}:{number}: {fault}")
                elif row is not None:
                    yield number, row
        if self.skipped > REPORTED_LINES:
            self.report(f"{self.path}: {self.skipped:,} bad lines skipped in all")

    def _lines(self, file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
        try:
            yield from _bounded_lines(file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadData(f"{self.path} is damaged or cut short ({error}); restore it from a copy") from None

    def _bad(self, message: str) -> None:
        if self.strict:
            raise BadData(message)
        if self.skipped <= REPORTED_LINES:
            self.report(message)


read_jsonl = JsonlReader


def read_json(path: Path, remedy: str) -> dict:
    """The object that a JSON file holds; BadData, with the remedy, if it holds anything else."""
    try:
        found = json.loads(path.read_bytes().decode())
        fault = None if isinstance(found, dict) else f"an object {{...}} is expected, found {type(found).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        found, fault = {}, getattr(error, "strerror", None) or str(error)
    if fault:
        raise BadData(f"{path} is damaged ({fault}); {remedy}")
    return found


def _bounded_lines(file) -> Iterator[bytes]:
    """Lines of a binary file; of an over-long one only the first MAX_LINE_BYTES + 1 bytes."""
    while raw := file.readline(MAX_LINE_BYTES + 1):
        rest = raw
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield raw


def _decode(raw: bytes) -> tuple[dict | None, str | None]:
    """The row, or its error; neither for a blank line."""
    if len(raw) > MAX_LINE_BYTES:
        return None, f"line is longer than {MAX_LINE_BYTES:,} bytes"
    if not raw.strip():
        return None, None
    try:
        row = json.loads(raw.decode())
        if b"\\ud" in raw.lower():  # half a surrogate pair is legal JSON and cannot be written, tokenised or shown
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    except UnicodeEncodeError:
        return None, "holds half a surrogate pair, which is not valid text"
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:  # JSONDecodeError, and integers beyond Python's digit limit
        return None, f"not JSON ({error})"
    if not isinstance(row, dict):
        return None, f"a row must be an object {{...}}, found {type(row).__name__}"
    return row, None


def take_lock(file: int | IO, lock: Callable[[int | IO, int], None] = fcntl.flock) -> bool:
    """Whether we hold the lock now; a file system without locks always gives it."""
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL: some network file systems
        pass
    return True


def cache_folder() -> Path:
    """For what was found out about this machine: DCCOT_CACHE, or dccot/ in the user's cache."""
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DCCOT_CACHE") or Path(users) / "dccot")


def read_cache(name: str) -> dict[str, Any]:
    """What a JSON file of cache_folder() holds; nothing if it is damaged, since all of it can be found out again."""
    file = cache_folder() / name
    try:
        return read_json(file, "what it held is found out again") if file.is_file() else {}
    except BadData as error:
        log.warning("%s", error)
        return {}


def change_cache(name: str, change: Callable[[dict[str, Any]], T]) -> T:
    """What `change` returns for the content of such a file, which is kept as changed; processes take turns.

    Where a cache cannot be written, as in a home that is read-only or full, nothing is kept.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = read_cache(name)
            result = change(found)
            write_atomic(folder / name, json.dumps(found, indent=1) + "\n")
            return result
    except OSError as error:
        log.warning("%s cannot be kept (%s): it will be found out again", folder / name, error)
        return change(read_cache(name))


def wait_for_lock(
    file: int,
    path: Path,
    patience: float,
    lock: Callable[[int | IO, int], None] = fcntl.flock,
    owner: Path | None = None,
) -> None:
    """Lock a file, or raise BadData. A holder on this machine is final; another machine may be dead, so its lock is
    retried for a while. `owner` is a file in which the holder has written who it is.
    """
    deadline, told = time.monotonic() + patience, False
    while not take_lock(file, lock):
        holder = (owner.read_text().strip() if owner else "") or "another process"
        age = time.time() - os.fstat(file).st_mtime
        if held_here(file) or time.monotonic() > deadline:
            remedy = "wait for it, end it, or choose another name"
            raise BadData(f"{path} is being written by {holder}, last {age:.0f} s ago; {remedy}")
        if not told:
            words = "%s is locked by %s on another machine, last written %.0f s ago; waiting %.0f s in case it is dead"
            log.warning(words, path, holder, age, patience)
            told = True
        time.sleep(min(1.0, patience / 10))


def held_here(file: int) -> bool:
    """Whether a process on this machine holds a lock on the file; also where the operating system does not say."""
    try:
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return True
    return any(words[-3].endswith(f":{os.fstat(file).st_ino}") for words in held if "->" not in words)


class JsonlWriter:
    """Appends rows, each as one complete line in a single write. One writer per file: a second one is rejected.

    Opening removes an unfinished last line left by a crash. A prefix of an object is never an object itself, so a last
    line that parses is complete and only lacks its newline: it is kept. Safe to call from several threads.
    """

    def __init__(self, path: str | Path):
        self.path, self._lock = Path(path), threading.Lock()
        make_folder(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            wait_for_lock(self._fd, self.path, LEASE_SECONDS)
            self.cut_bytes = _cut_partial_line(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, row: dict) -> None:
        """Append one row; a failed write (disk full) leaves the file as it was."""
        line = json_line(row)
        with self._lock:
            end = os.fstat(self._fd).st_size
            try:
                while line:  # once, unless the disk is full: then the second write says so
                    line = line[os.write(self._fd, line) :]
            except OSError:
                os.ftruncate(self._fd, end)
                raise

    def rows(self) -> Iterator[dict]:
        """Rows already in the file, so that a rerun can continue from there."""
        if self.path.stat().st_size:
            for _, row in read_jsonl(self.path):
                yield row

    def flush(self) -> None:
        """Every row so far survives a power cut."""
        os.fsync(self._fd)
        flush_to_disk(self.path.parent)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _cut_partial_line(fd: int) -> int:
    """Make the file end with a newline; returns how many bytes of an unfinished line were removed."""
    size = os.fstat(fd).st_size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        tail = os.pread(fd, step, start) + tail
    tail = tail.rpartition(b"\n")[2]
    if not tail:
        return 0
    if _decode(tail)[0] is not None:
        os.write(fd, b"\n")
        return 0
    os.ftruncate(fd, size - len(tail))
    return len(tail)


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder (its directory entries). Some network file systems do not support it for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """mkdir with parents, flushed to disk like the files to be written into it."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        flush_to_disk(folder.parent)


def checksum(path: str | Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A temporary file that replaces `path` when the block ends: it is always the old file or the complete new one."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # root would replace a device by a file
        raise BadData(f"{path} is a device or a pipe, which cannot be replaced; name a file")
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=GZIP_LEVEL, fileobj=file, mtime=0) as compressed:
                    yield compressed
            else:
                yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        flush_to_disk(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_atomic(path: str | Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode("utf-8"))


def json_line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def write_jsonl_atomic(path: str | Path, rows: Iterable[dict]) -> int:
    """The whole file or nothing; returns the number of rows. The same rows give the same bytes, compressed or not."""
    count = 0
    with atomic_file(path) as file:
        for row in rows:
            file.write(json_line(row))
            count += 1
    return count
