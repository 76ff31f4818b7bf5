"""Worker of the lab tests: TCP flows between hosts; each receiver prints its rate on the wire.

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


def receive(server, index):
    connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    connection.recv_into(buffer)
    began, total = time.monotonic(), 0
    while count := connection.recv_into(buffer):
        total += count
    seconds = time.monotonic() - began
    rate = total * 8 * WIRE_PER_PAYLOAD / seconds
    print(json.dumps({"flow": index, "rate": rate, "seconds": seconds}), flush=True)


def send(index, address, tos):
    flow = socket.socket()
    flow.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    deadline = time.monotonic() + 10
    while flow.connect_ex((address, FIRST_PORT + index)):
        if time.monotonic() > deadline:
            raise SystemExit(f"flow {index}: {address} does not answer")
        time.sleep(0.005)
    data, end = bytes(1 << 17), time.monotonic() + SECONDS
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
