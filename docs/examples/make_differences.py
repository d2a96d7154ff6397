"""Make problems for a first task: long differences, such as 8-3-9-1-4-2-6-5."""

import json
import random
from pathlib import Path

draw = random.Random(0)
for name, number in {"train": 600, "val": 128}.items():
    lines = []
    for _ in range(number):
        first, *others = (draw.randint(1, 9) for _ in range(8))
        problem = f"Compute {'-'.join(map(str, [first, *others]))}."
        lines.append(json.dumps({"problem": problem, "answer": first - sum(others)}))
    Path(f"differences_{name}.jsonl").write_text("\n".join(lines) + "\n")
