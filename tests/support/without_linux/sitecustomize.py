"""Removes functions that Python has on Linux and not on macOS, in processes that import this."""

import os
import signal
import socket

NOT_ON_MACOS = {
    os: (
        "copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getxattr listxattr "
        "memfd_create O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_TMPFILE pidfd_open pipe2 "
        "posix_fadvise posix_fallocate removexattr sched_getaffinity sched_getscheduler "
        "sched_setaffinity setns setxattr splice unshare"
    ),
    signal: "pidfd_send_signal SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET SO_PASSCRED SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK",
}

for _module, _names in NOT_ON_MACOS.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)

if hasattr(os, "process_cpu_count"):  # Python ≥ 3.13; on Linux it uses sched_getaffinity
    setattr(os, "process_cpu_count", os.cpu_count)  # noqa: B010 - types of 3.11 do not have it
