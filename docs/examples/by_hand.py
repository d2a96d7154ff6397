"""A task and its rewards by hand, as a run calls them: to see what they give, and to debug them."""

from grail_lightning import MathTask, RewardSpec, grade_answers
from grail_lightning.answers import Verifier

task = MathTask(rewards=[RewardSpec(function="correctness"), RewardSpec(function="my_reward.brevity", weight=0.1)])
prompt = task.prompt({"problem": "What is 1+1?", "answer": "2"})
text = r"It is \boxed{2}."

if __name__ == "__main__":  # The verifier starts processes, which import this file.
    with Verifier(num_workers=1) as verifier:
        verdicts = grade_answers([text], [prompt], verifier)
    print(verdicts[0].status, repr(verdicts[0].prediction))
    print(task.reward_values([text], [prompt], verdicts, lengths=[6]))
    print(task.reward([text], [prompt], verdicts, lengths=[6]))
