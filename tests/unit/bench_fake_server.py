"""What ``bench`` and SGLang's load generator need to see of a server, in a script that starts at once.

Run with SGLang's arguments. Six tokens an answer; a speculating server needs two passes for the last
five, and at prompts with "odd" DFLASH2 ends otherwise. With ``--fail-after N``, the N-th and later
questions kill it; ``--delay`` is how many seconds each takes.
"""

import argparse
import itertools
import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IDS = [11, 12, 13, 14, 15, 16]
TOP = [[-0.1, 0, None], [-0.4, 99, None]]  # the token itself, and one nearly as likely
asked = itertools.count(1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        told = {"/v1/models": {"data": [{"id": "fake"}]}, "/server_info": {"internal_states": []}}
        self.reply(told.get(self.path, {}))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.path.startswith("/generate"):
            self.reply({})
            return
        if arguments.fail_after and next(asked) >= arguments.fail_after:
            print("RuntimeError: the scheduler fell over", flush=True)
            os._exit(7)
        time.sleep(arguments.delay)
        request = json.loads(body)
        answer = generated(request)
        if request.get("stream"):
            first = {
                **answer,
                "text": "a",
                "meta_info": {"completion_tokens": 1, "prompt_tokens": 3},
            }
            parts = [f"data: {json.dumps(part)}\n\n" for part in (first, answer)]
            self.reply("".join([*parts, "data: [DONE]\n\n"]), "text/event-stream")
        else:
            self.reply(answer)

    def reply(self, body, kind="application/json"):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def generated(request):
    ids = list(IDS)
    if arguments.speculative_algorithm == "DFLASH2" and "odd" in request["text"]:
        ids[3] = 99
    info = {"completion_tokens": len(ids), "prompt_tokens": 3}
    if arguments.speculative_algorithm:
        info |= {"spec_accept_length": len(ids) / 2, "spec_verify_ct": 2}
        info["spec_correct_drafts_histogram"] = [0, 1, 1]
    if request.get("return_logprob"):
        info["output_top_logprobs"] = [
            [[lp, token or i, None] for lp, token, _ in TOP] for i in ids
        ]
    return {"text": "abcdef", "output_ids": ids, "meta_info": info}


parser = argparse.ArgumentParser()
parser.add_argument("--fail-after", type=int, default=0)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--speculative-algorithm", default="")
arguments = parser.parse_known_args()[0]
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
