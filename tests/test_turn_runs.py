"""Several turns on the host engine: where the saved state lies, what an environment says, what is refused.

prompt | response 1 | observation 1 | response 2 | ..       a trajectory's keys and values stay where they are
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithm_runs import ACTOR, HOSTS, REFERENCE, TURNS, WORKLOAD, Watched, job_of, plan_of
from runtime_threads import InThreads
from runtime_tiny import luck

from rollplex.ir.errors import DataError, RollplexError, RunError
from rollplex.ir.job_checks import check_job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Run

torch.set_num_threads(1)


def roles(**actor: Any) -> dict[str, Any]:
    return {"actor": {**ACTOR["actor"], **actor}, **REFERENCE}


@pytest.mark.parametrize(
    ("saved", "recompute"), [("host", "none"), ("host", "full"), ("hbm", "none"), ("dropped", "full")]
)
def test_two_steps_are_those_of_whole_trajectories_wherever_the_saved_state_lies(saved: str, recompute: str) -> None:
    watched = Watched(plan_of("embodied", roles=roles(prefix_saved=saved, recompute=recompute)))
    book = watched.textbook("embodied")
    for k in range(2):
        watched.step(k)
        book.step(watched.prompts, watched.rollouts, watched.histories, luck)
        assert watched.loss("actor") == pytest.approx(book.losses["actor"], abs=1e-10)
        assert watched.norm("actor") == pytest.approx(book.norms["actor"], abs=1e-10)
        now = watched.weights("actor")
        assert max((now[n] - p).abs().max().item() for n, p in book.models["actor"].parameters.items()) < 1e-10
    plan = watched.run.plan
    for name in ("actor.prefix_saved", "actor.prefix_saved.2", "actor.prefix_saved.3"):
        assert set(plan.object(name).residency.values()) - {"-"} == {saved}
    watched.run.close()


def test_a_history_is_the_prompt_all_responses_and_all_that_was_seen_in_the_chat_template() -> None:
    watched = Watched(plan_of("embodied"), ends=None)
    watched.run.feed._eos = (258, *range(0, 256, 7))  # <|im_end|> ends a response too
    watched.step(0)
    text = watched.run.feed.maker.tokenizer.encode
    end, start, line = [258], [257], text("\n")
    for before, history, rollout, turn in zip(
        (None, watched.histories[0]), watched.histories, watched.rollouts, (1, 2), strict=False
    ):
        for p, prompt in enumerate(watched.prompts):
            for i, response in enumerate(rollout.responses(p)):
                said = HOSTS["environment"](response.tolist(), turn, i)
                ended = int(response[-1]) in watched.run.feed._eos
                user, model = text(f"user\n{said}"), text("assistant\n")
                seen = [*([] if ended else end), *line, *start, *user, *end, *line, *start, *model]
                old = prompt if before is None else before[p][i]
                wanted = [*old.input_ids.tolist(), *response.tolist(), *seen]
                assert history[p][i].input_ids.tolist() == wanted
                new = len(response) + len(seen)
                assert history[p][i].next_position == old.next_position + new
                assert history[p][i].position_ids[:, -1].tolist() == [old.next_position + new - 1] * 3
    watched.run.close()


def test_the_reward_sees_the_history_and_the_turn_of_its_response() -> None:
    asked: list[tuple[int, str]] = []

    def reward(tokens: list[int], turn: int, history: str) -> float:
        asked.append((turn, history))
        return luck(tokens)

    run = InThreads(plan_of("embodied"), {**HOSTS, "reward": reward})
    run.step(0)
    assert len(asked) == 2 * WORKLOAD["group"]
    assert {turn for turn, _ in asked} == {3}
    assert all(text.count("<|im_start|>user") == 3 for _, text in asked)
    run.close()


REFUSED: dict[str, tuple[Callable[..., Any], type[RollplexError], str]] = {
    "no text": (
        lambda: 3, RunError,
        r"train.jsonl:\d+, response 0, turn 1: `environment` returned 3, not a text\n    try: an environment returns",
    ),
    "too long": (
        lambda: "x" * 40, DataError,
        r"response 0, turn 1: the observation has \d+ tokens, the plan allows 36\n    try: raise workload.turns.obser",
    ),
    "raises": (lambda: 1 / 0, RunError, r"response \d, turn 1: `environment` raised ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_environment_that_fails_is_told_with_its_row_response_and_turn(name: str) -> None:
    says, error, message = REFUSED[name]
    run = InThreads(plan_of("embodied"), {**HOSTS, "environment": says})
    with pytest.raises(error, match=message):
        run.step(0)


def test_observations_with_frames_are_refused_on_the_host() -> None:
    job = job_of("embodied", workload={**WORKLOAD, "turns": {**TURNS, "frames": 1}})
    assert any("the host engine reads observations of text" in finding.what for finding in check_job(job))
    assert not [f for f in check_job(job_of("embodied")) if "turns" in f.path]


def test_a_plan_of_several_turns_runs_on_the_host_engine_and_on_no_other() -> None:
    assert plan_of("embodied").not_executable == ()
    other = {"train": {"engine": "megatron", "sequence_parallel": False}}
    plan: Plan = plan_of("embodied", roles=roles(**other), model={"dtype": "float32"})
    assert any(what.startswith("3 turns: the host engine alone") for what in plan.not_executable)


def test_later_turns_write_pieces_of_their_own_and_read_those_before() -> None:
    steps = [s for s in plan_of("embodied").programs["train"] if isinstance(s, Run) and s.task == "prefix"]
    third = next(s for s in steps if "actor.boundary.3" in s.writes)
    assert {"actor.boundary", "actor.boundary.2"} < set(third.reads)
