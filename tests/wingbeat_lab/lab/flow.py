"""Worker of the lab tests: TCP flows between hosts; each receiver prints its bits on the wire.

Usage: ``flow.py SECONDS '[[src, dst, address, tos], ...]'``. Plain sockets, standard library.
"""

import json
import os
import socket
import sys
import threading
import time

SECONDS, FLOWS = float(sys.argv[1]), json.loads(sys.argv[2])
RANK = int(os.environ["RANK"])
FIRST_PORT = 5000
WIRE_PER_PAYLOAD = 1514 / 1448


def report(**values):
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def receive(server, index):
    connection, _ = server.accept()
    buffer, total = bytearray(1 << 20), 0
    while count := connection.recv_into(buffer):
        total += count
    ended = time.monotonic()
    report(flow=index, bits=total * 8 * WIRE_PER_PAYLOAD, ended=ended)


def send(index, address, tos):
    flow = socket.socket()
    flow.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    deadline = time.monotonic() + 10
    while flow.connect_ex((address, FIRST_PORT + index)):
        if time.monotonic() > deadline:
            raise SystemExit(f"flow {index}: {address} does not answer")
        time.sleep(0.005)
    # The sender's clock, which is the receiver's too: a receiver that wakes up late would count
    # bytes that arrived before its own first look.
    began = time.monotonic()
    report(flow=index, began=began)
    data, end = bytes(1 << 17), began + SECONDS
    while time.monotonic() < end:
        flow.sendall(data)
    flow.close()


threads = []
for i, (source, target, where, tos) in enumerate(FLOWS):
    if target == RANK:
        listener = socket.create_server(("0.0.0.0", FIRST_PORT + i))
        threads.append(threading.Thread(target=receive, args=(listener, i)))
    if source == RANK:
        threads.append(threading.Thread(target=send, args=(i, where, tos)))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
