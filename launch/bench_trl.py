"""The seconds of TRL's GRPO steps, as JSON: python launch/bench_trl.py MODEL ROOT OUT P G NEW STEPS BF16

launch/bench.py runs it in an environment that has TRL (row 3); this project's own does not.
Hardware: as bench.py. Last run: 2026-12-01.
"""

import json
import sys
import time

folder, root, out, P, G, new, steps, bf16 = *sys.argv[1:4], *map(int, sys.argv[4:])
sys.path.insert(0, root)
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from launch.lib.data import addition
from launch.lib.reward import addition_reward


class Clock(TrainerCallback):
    times = []

    def on_step_begin(self, *args, **more):
        self.begin = time.perf_counter()

    def on_step_end(self, *args, **more):
        self.times.append(time.perf_counter() - self.begin)


def grade(completions, answer, **more):
    return [addition_reward(y, a) for y, a in zip(completions, answer, strict=True)]


settings = GRPOConfig(
    output_dir=out,
    use_cpu=True,
    bf16=bool(bf16),
    max_steps=steps,
    num_generations=G,
    beta=0.0,
    per_device_train_batch_size=P * G,
    max_completion_length=new,
    learning_rate=1e-6,
    temperature=1.0,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
    gradient_checkpointing=False,
    optim="adamw_torch_fused",
    dataloader_pin_memory=False,
    model_init_kwargs={"dtype": "float32"},
)
data = Dataset.from_list(addition(4096, 0))
trainer = GRPOTrainer(
    folder, reward_funcs=grade, args=settings, train_dataset=data, callbacks=[Clock()]
)

if __name__ == "__main__":
    trainer.train()
    print(json.dumps(Clock.times))
