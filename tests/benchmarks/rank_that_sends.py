"""A rank without torch: senders and receivers named on the command line, plain TCP.

A sender says on standard output how many seconds it took and how many bytes the kernel sent, those sent again included.

python rank_that_sends.py SENT_BYTES SENDER-RECEIVER...
"""

import os
import socket
import struct
import sys
import threading
import time

TCP_INFO_BYTES_SENT = 200  # where tcpi_bytes_sent, 64 bits, stands in struct tcp_info since Linux 4.19


def bytes_sent(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_SENT + 8)
    return struct.unpack_from("=Q", info, TCP_INFO_BYTES_SENT)[0]


def receive(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")  # so that the sender knows all has arrived
    connection.close()


def send(receiver: int, sent_bytes: int) -> None:
    address = os.environ["MASTER_ADDR"].rpartition(".")[0] + f".{receiver + 1}"
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, 4000))
            break
        except ConnectionRefusedError:  # the receiver is not up yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    begun = time.perf_counter()
    connection.sendall(bytes(sent_bytes))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    seconds = time.perf_counter() - begun
    sys.stdout.write(f"{seconds} {bytes_sent(connection)}\n")  # at once: print writes piece by piece
    connection.close()


rank, sent_bytes = int(os.environ["RANK"]), int(sys.argv[1])
pairs = [tuple(map(int, word.split("-"))) for word in sys.argv[2:]]
with socket.create_server(("", 4000)) as server:
    threads = [threading.Thread(target=receive, args=(server,)) for _, receiver in pairs if receiver == rank]
    threads += [
        threading.Thread(target=send, args=(receiver, sent_bytes)) for sender, receiver in pairs if sender == rank
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
