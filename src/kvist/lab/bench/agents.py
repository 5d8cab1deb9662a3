"""`kvist bench agents`: a closed loop of agents, with and without reuse of what they said before.

Every agent has a long static beginning (instructions and tools, the same for all of its kind), and
comes back after each tool call with everything so far and the tool's answer behind it. Some of its
turns branch: several continuations of the same context. Nobody asks before they were answered, so
what is slow here also comes later: a closed loop, unlike `kvist bench serve`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvist.lab.bench.host import Host, Session, Timeline
from kvist.lab.bench.hosted import HostedBench
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell, quotient

_TURNS = (
    Column("turn", "turn", 0),
    Column("context_tokens", "context, tokens", 0),
    Column("cached_share", "from the cache, %", 1, 100),
    Column("reused_ttft_s", "first token, reused, s", 3),
    Column("computed_ttft_s", "first token, computed, s", 3),
)
_RUNS = (
    Column("mode", "prefix caching"),
    Column("wall_s", "all agents done, s", 2),
    Column("read_tokens", "prompt tokens computed", 0),
    Column("pauses_s", "of it in tools, an agent, s", 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsWorkload:
    """What is measured.

    Attributes
    ----------
    agents, kinds : int
        Agents of one kind share their static beginning.
    static : int
        Tokens of it.
    turns : int
        Of each agent.
    tool_answer, said : int
        Tokens that come back from a tool, and that the agent says.
    pause_s : float
        A tool takes, on average.
    branch_every, branches : int
        Every so many turns the agent asks for so many continuations, and goes on with the first.
    repeats : int
    """

    agents: int = 6
    kinds: int = 2
    static: int = 1024
    turns: int = 6
    tool_answer: int = 96
    said: int = 24
    pause_s: float = 0.25
    branch_every: int = 3
    branches: int = 3
    repeats: int = 2
    seed: int = 0


@dataclass(slots=True)
class _Agent:
    text: tuple[int, ...]
    turn: int = 0
    due_s: float = 0.0
    paused_s: float = 0.0
    line: Timeline | None = None


class AgentsBench(HostedBench[AgentsWorkload]):
    """The same agents, with prefix caching on and off.

    Parameters
    ----------
    host : Host
    work : AgentsWorkload
    """

    name = "agents"
    question = "What does reuse bring agents, who send everything again on every turn?"

    def __init__(self, host: Host, work: AgentsWorkload) -> None:
        super().__init__(host, work)
        self._runs = Samples()

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        self._host.warm_up()
        rounds = [(r, on) for r in range(self._work.repeats) for on in (True, False)]
        for number, (repeat, reuse) in enumerate(rounds):
            mode = "on" if reuse else "off"
            tell(number / len(rounds), f"prefix caching {mode}, round {repeat + 1}")
            self._run(mode, self._host.open(prefix_caching=reuse))

    def _run(self, mode: str, session: Session) -> None:
        host, work = self._host, self._work
        draw = random.Random(work.seed)
        starts = [host.prompt(work.static) for _ in range(work.kinds)]
        agents = [
            _Agent(starts[n % work.kinds] + host.prompt(work.tool_answer))
            for n in range(work.agents)
        ]
        start_s = host.clock()
        read = 0
        left = list(agents)
        while left:
            now = host.clock()
            for agent in left:
                if agent.line is None and agent.due_s <= now:
                    branches = (agent.turn + 1) % work.branch_every == 0
                    agent.line = session.add(
                        agent.text, work.said, continuations=work.branches if branches else 1
                    )
            if not session.engine.has_work:
                host.wait(max(0.0, min(agent.due_s for agent in left) - now))
                continue
            session.step()
            for agent in left:
                if agent.line is not None and agent.line.is_finished:
                    read += len(agent.text) - agent.line.num_cached
                    self._end_turn(mode, agent, draw)
            left = [agent for agent in left if agent.turn < work.turns]
        self._runs.note(mode, "wall_s", host.clock() - start_s)
        self._runs.note(mode, "pauses_s", sum(a.paused_s for a in agents) / len(agents))
        self._runs.note(mode, "read_tokens", read)

    def _end_turn(self, mode: str, agent: _Agent, draw: random.Random) -> None:
        host, work = self._host, self._work
        line = agent.line
        assert line is not None
        agent.turn += 1
        self._samples.put(agent.turn, "context_tokens", len(agent.text))
        if mode == "on":
            self._samples.note(agent.turn, "reused_ttft_s", line.ttft_s)
            self._samples.note(agent.turn, "cached_share", line.num_cached / len(agent.text))
        else:
            self._samples.note(agent.turn, "computed_ttft_s", line.ttft_s)
        agent.text += (*line.token_ids, *host.prompt(work.tool_answer))
        pause_s = draw.uniform(0.5, 1.5) * work.pause_s
        if agent.turn < work.turns:
            agent.paused_s += pause_s
        agent.due_s = host.clock() + pause_s
        agent.line = None

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        work = self._work
        chart = Chart("First token by turn", "turn", ("reused_ttft_s", "computed_ttft_s"), "s")
        title = f"{work.agents} agents of {work.kinds} kinds, {work.static:,} static tokens"
        return (
            Table("turns", title, _TURNS, self._samples.rows("turn"), (chart,)),
            Table("runs", "whole runs", _RUNS, self._runs.rows("mode")),
        )

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        found = []
        sooner = quotient(self._runs.median("off", "wall_s"), self._runs.median("on", "wall_s"))
        if sooner is not None:
            found.append(f"With reuse the agents are done {sooner:.1f} × sooner, tools included.")
        read = [self._runs.median(mode, "read_tokens") for mode in ("off", "on")]
        if (saved := quotient(*read)) is not None:
            found.append(f"Without it {saved:.1f} × as many prompt tokens are computed.")
        return tuple(found)
