import json
import os
import signal
import sys
import time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
run = Path(words["hydra.run.dir"])
run.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: ((run / "saved").touch(), os._exit(75)))
value = (float(words["x"]) - 3) ** 2
if words.get("fail") == words["x"]:
    sys.exit("no")
step, slow = 0, words.get("slow") == words["x"]
while step < 2:
    step += 1
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step, "val_loss": value}), file=file)
    if slow:
        time.sleep(0.2)
(run / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
