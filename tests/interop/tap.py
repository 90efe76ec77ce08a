"""Records what TensorFlow's client says to a master: tap.py TARGET FILE SCRIPT [ARG...].

The script is run with the tap's own target in place of `{}`; each call goes into FILE as three counted blobs: method,
request, answer. `tests/session.rs` replays such files."""

import struct
import subprocess
import sys
import threading
from concurrent import futures

import grpc

target, file = sys.argv[1:3]
channel = grpc.insecure_channel(target.removeprefix("grpc://"))
lock, out = threading.Lock(), open(file, "wb")


class Tap(grpc.GenericRpcHandler):
    def service(self, details):
        method = details.method

        def call(request, _):
            answer = channel.unary_unary(method)(request, wait_for_ready=True)
            with lock:
                for blob in (method.encode(), request, answer):
                    out.write(struct.pack("<I", len(blob)) + blob)
                out.flush()
            return answer

        return grpc.unary_unary_rpc_method_handler(call)


server = grpc.server(futures.ThreadPoolExecutor(32))
server.add_generic_rpc_handlers((Tap(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
args = [arg.replace("{}", f"grpc://127.0.0.1:{port}") for arg in sys.argv[3:]]
sys.exit(subprocess.run([sys.executable, *args]).returncode)
