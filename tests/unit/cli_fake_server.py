"""What the CLI needs to see of an SGLang server, in a script that starts in no time.

Run with SGLang's arguments. ``--behave`` adds a fault: ``die`` ends while starting, ``crash`` at
the first question, ``stubborn`` ignores SIGTERM, ``orphan`` leaves its child behind when it ends.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
TEXT = "One fish, two fish."


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b"", "text/plain")

    def do_POST(self):
        if arguments.behave == "crash":
            print("RuntimeError: the scheduler fell over", flush=True)
            os._exit(7)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["max_tokens"] > 1000:
            self.reply(b'{"message": "too many tokens"}', "application/json", 400)
        elif request.get("stream"):
            parts = [chunk({"content": word + " "}) for word in TEXT.split()]
            events = [f"data: {json.dumps(part)}\n\n" for part in parts]
            self.reply("".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream")
        else:
            self.reply(json.dumps(completion(request)).encode(), "application/json")

    def reply(self, body, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def chunk(delta):
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    common = {"id": "1", "created": 0, "model": "fake", "object": "chat.completion.chunk"}
    return {**common, "choices": [choice]}


def completion(request):
    """Seven tokens; a speculating server needs three steps for the last six of them."""
    differs = arguments.speculative_algorithm == "DFLASH2" and "odd" in str(request["messages"])
    message = {"role": "assistant", "content": TEXT + (" Red fish." if differs else "")}
    answer = {
        "id": "1",
        "created": 0,
        "model": "fake",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
    }
    if arguments.speculative_algorithm and request.get("return_spec_tokens_details"):
        answer["sglext"] = {"spec_tokens_details": {"spec_verify_ct": 3}}
    return answer


def main():
    if arguments.behave == "die":
        print(
            "Traceback (most recent call last):\nValueError: no such drafter\nthe end", flush=True
        )
        sys.exit(3)
    if arguments.behave == "orphan":
        subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    else:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        signal.signal(signal.SIGTERM, lambda number, frame: (child.kill(), os._exit(0)))
    if arguments.behave == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.behave == "hang":
        time.sleep(600)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


parser = argparse.ArgumentParser()
parser.add_argument("--behave", default="")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--speculative-algorithm", default="")
arguments = parser.parse_known_args()[0]
if __name__ == "__main__":
    main()
