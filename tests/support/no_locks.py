"""A process that the kernel refuses every file lock, as on a file system that has none (seccomp; x86-64 and ARM64
Linux).
"""

import ctypes
import errno
import fcntl
import platform
import struct

FLOCK, FCNTL = {"x86_64": (73, 72), "aarch64": (32, 25)}[platform.machine()]  # numbers of the system calls
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOLCK
NUMBER, SECOND_ARGUMENT = 0, 24  # where seccomp_data holds them


def refuse_locks() -> None:
    """From here on, in this thread and its children, flock and fcntl(F_SETLK) fail with ENOLCK."""
    program = [
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_EQUAL, 4, 0, FLOCK),
        (JUMP_IF_EQUAL, 0, 2, FCNTL),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (JUMP_IF_EQUAL, 1, 0, fcntl.F_SETLK),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (38, 1, 0, 0, 0),
        (22, 2, ctypes.addressof(filter_), 0, 0),
    ):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(arguments[0], *map(ctypes.c_ulong, arguments[1:])):
            raise OSError(ctypes.get_errno(), "prctl")
