"""Turns steps into the jobs and joins of one transaction.

    steps (immutable, composed)  →  Plan: checked, encoded, no empty groups  →  _core.Graph: jobs, joins, ids

A *join* waits for its members and then releases the jobs that it holds. A chain has a join between each pair of steps,
and a group is a join. The graph is built from the end of a workflow to its beginning, since each job names the join
after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from penstock import _core
from penstock._durations import due_ms, is_a
from penstock._flows.describe import checked_name, description, name_of
from penstock._flows.graph import Graph, order_of
from penstock._flows.results import (
    EMPTY,
    LIST,
    MAY_GROW,
    NAMED,
    WRAPS,
    MemberIds,
    encode_names,
    is_join,
    names_id,
)
from penstock._flows.steps import (
    AT_ONCE,
    FAILED,
    MOST_MEMBERS,
    SUCCEEDED,
    TOO_MANY,
    Chain,
    Chord,
    Group,
    Link,
    Partial,
    Signature,
)
from penstock._flows.workflow import Workflow
from penstock._jobs.current import format_id, running_job_id
from penstock._jobs.job import Job

if TYPE_CHECKING:
    from datetime import datetime

    from penstock._durations import Seconds
    from penstock._tasks.app import App
    from penstock._tasks.middleware import Call

# Forms in which the broker passes the values of a join to a job.
_ONE, _LIST = range(2)

# Time for which the names of a graph's steps are kept beyond the lifetime of its result, which starts later.
_NAMES_KEPT_MS = 30 * 24 * 60 * 60 * 1000

# Maximum nesting of groups. Readers of their values go no deeper.
_DEEPEST = 128

# Bytes of a part of a large group, and the overhead of a job in addition to its body.
_PART_BYTES = 1 << 20
_JOB_BYTES = 192

_NO_ARGUMENTS: tuple[Any, ...] = ()
# Value of an empty group.
_EMPTY_LIST: tuple[Any, ...] = ([],)


@dataclass(slots=True)
class _Sequence:
    """Nodes that run one after another."""

    nodes: list[_Node]


@dataclass(slots=True)
class _Group:
    """Nodes that run at the same time."""

    nodes: list[_Node]
    max_failures: int
    is_growing: bool = False
    """Whether more members follow in later parts."""


@dataclass(slots=True)
class _Growing:
    """Group that is too large for one transaction."""

    group: Group[Any]
    members: Iterator[Partial[Any, Any]]
    wanted: bool
    depth: int
    sent: int
    """Number of planned members."""


@dataclass(slots=True)
class _Graph:
    """Nodes that run once the nodes that they need have ended."""

    nodes: list[_Node]
    names: list[str]
    needs: list[tuple[tuple[int, int], ...]]
    sequence: list[int]
    ends: list[int]


@dataclass(slots=True)
class _Empty:
    """Group without members whose value is needed."""


@dataclass(slots=True)
class _Linked:
    """Node with callbacks, each with the outcome on which it runs."""

    node: _Node
    callbacks: list[tuple[_Node, int]]


# A job is an index into the plan, so that a large group needs only an integer for each member.
_Node: TypeAlias = "int | _Sequence | _Group | _Graph | _Empty | _Linked"


class _Fed(NamedTuple):
    """Values that a step gets from previous steps."""

    waits: bool
    """Whether there is a previous step."""
    takes: int = 0
    """Number of values from previous steps."""
    first: tuple[Any, ...] = _NO_ARGUMENTS
    """Values known in advance: those of empty groups."""


_FIRST = _Fed(False)
_NEXT = _Fed(True, 1)
# After an empty group at the beginning of a chain.
_AFTER_NOTHING = _Fed(False, 0, _EMPTY_LIST)


class Spawned(NamedTuple):
    """Parameters for a workflow that a running job sends, once for all of its runs."""

    job_id: bytes
    workflow: bytes | None
    """Workflow of the job."""
    seed: bytes
    """Bytes from which the ids are derived."""
    key: bytes
    """Key of the note that the workflow was sent."""
    kept_ms: int
    """Time for which the note is kept."""


class Sent(NamedTuple):
    """Handles of a sent workflow. One that consists of a single call and its callbacks has a job, too."""

    workflow: Workflow[Any]
    job: Job[Any] | None


class Plan:
    """Jobs of a workflow, in the order in which they were written, and their dependencies.

    Raises ``TypeError`` where arguments do not fit, and ``ValueError`` where the steps cannot form one workflow.
    """

    def __init__(
        self,
        step: Partial[Any, Any],
        name: str | None = None,
        *,
        deadline: Seconds | datetime | None = None,
        atomic: bool = False,
        wanted: bool = False,
        spawned: Spawned | None = None,
    ) -> None:
        self._step = step
        self._spawned = spawned
        self._name = None if name is None else checked_name(name)
        self._deadline = due_ms("deadline", deadline)
        # The group that need not be sent at once, and the part to send later.
        self._may_grow = None if atomic else self._first_group(step)
        self._growing: _Growing | None = None
        # Ids of the workflow and of that group's join, once it was built.
        self.id = b""
        self.join = b""
        self._app: App | None = None
        self._signatures: list[Signature[Any]] = []
        self._jobs: list[tuple[_core.Options, bytes]] = []
        # Number of first arguments of each job that are values of previous steps.
        self._takes: list[int] = []
        self._marks: dict[int, str] = {}
        self._result_options: dict[int, _core.Options] = {}
        # Callbacks of an empty group, which run at once.
        self._loose: list[_Node] = []
        self._root = self._node(step, _FIRST, wanted, 0)

    def __len__(self) -> int:
        return len(self._jobs)

    def send(self) -> Sent:
        app = self._app
        return self.sent(None if app is None else app._send_plan(self))

    async def asend(self) -> Sent:
        app = self._app
        return self.sent(None if app is None else await app._asend_plan(self))

    @property
    def app(self) -> App:
        assert self._app is not None  # there is a job
        return self._app

    def jobs(self) -> list[tuple[_core.Options, bytes]]:
        """Return the options and the body of each job."""
        return self._jobs

    def calls(self) -> list[Call]:
        """Describe each job for middleware."""
        return [
            signature._sender._call(signature.args, dict(signature.kwargs), body, options)
            for signature, (options, body) in zip(self._signatures, self._jobs, strict=True)
        ]

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a job as they were written."""
        signature = self._signatures[number]
        return signature.args, dict(signature.kwargs)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def is_lone(self) -> bool:
        """Whether the plan is a call without callbacks, which is a job and not a workflow."""
        return isinstance(self._step, Signature) and not self._step._links

    @property
    def is_nothing(self) -> bool:
        """Whether the plan is an empty group, which may have callbacks."""
        return self._root is None

    def build(self, jobs: Sequence[tuple[_core.Options, bytes]], *, opens: bool = True) -> Built:
        """Build the graph of the plan's jobs, given with their final headers and times.

        ``opens``: whether they form a workflow of their own.
        """
        builder = _Builder(self._takes, self._marks, jobs)
        spawned = self._spawned
        if spawned is None:
            return self._build(builder, None, opens)
        builder.graph.derive_ids(spawned.job_id, spawned.seed)
        builder.graph.note(spawned.key, spawned.kept_ms, True)
        return self._build(builder, None, spawned.workflow is None)

    def build_in_place(
        self, jobs: Sequence[tuple[_core.Options, bytes]], job_id: bytes, depth: int, *, opens: bool
    ) -> Built:
        """Like ``build``, for a plan whose outcome replaces a job. ``depth``: number of replacements so far."""
        # The place that follows from the job's id. The broker takes it to mean the place that the job has, if any.
        return self._build(_Builder(self._takes, self._marks, jobs, depth), _place_of(job_id), opens)

    def build_as_member(self, jobs: Sequence[tuple[_core.Options, bytes]], job_id: bytes, *, outer: bool) -> Built:
        """Like ``build``, for a new member of a job's group. ``outer``: the job's join is the group's member."""
        builder = _Builder(self._takes, self._marks, jobs)
        member = builder.graph.grow(job_id, outer)
        # The place that follows from this id. The broker takes it to mean the place that the member gets.
        return self._build(builder, _place_of(member), False)

    def _build(self, builder: _Builder, place: _Place | None, opens: bool) -> Built:
        built = builder.build(self._root, self._loose, place)
        if opens and self._root is not None and not self.is_lone:
            steps = Described(self._root, self._signatures, built.job_ids, builder.groups)
            name = name_of(self._step) if self._name is None else self._name
            after_ms, at_ms = self._deadline
            built.graph.open(
                name,
                description(steps),
                deadline_after_ms=after_ms,
                deadline_at_ms=at_ms,
                parent=running_job_id() if place is None else None,
            )
        self.id, self.join = built.workflow_id, builder.growing
        return built

    def named(self, built: Built) -> bytes | None:
        """Return the workflow id of the jobs; None if they belong to no workflow."""
        if self._spawned is None:
            return built.workflow_id
        own = None if self.is_lone else built.workflow_id
        return own if self._spawned.workflow is None else self._spawned.workflow

    # A group that is too large for one transaction.

    @property
    def is_growing(self) -> bool:
        """Whether members of a large group have to be sent later: see ``next_part``."""
        return self._growing is not None

    @property
    def planned_members(self) -> int:
        """Number of members of that group planned so far."""
        return 0 if self._growing is None else self._growing.sent

    @property
    def id_text(self) -> str:
        """Id of the workflow as text."""
        return format_id(self.id)

    def next_part(self) -> Part | None:
        """Plan the next members; None when there are none left. ``jobs`` and ``calls`` then return those of this
        part."""
        growing = self._growing
        assert growing is not None
        # Earlier parts may still be in flight.
        self._signatures, self._jobs, self._takes, self._marks = [], [], [], {}
        nodes: list[_Node] = []
        first = growing.sent
        size = 0
        for member in growing.members:
            if growing.sent == MOST_MEMBERS:
                raise ValueError(TOO_MANY)
            planned = len(self._jobs)
            nodes.append(self._member(growing.group, member, growing.wanted, growing.depth))
            growing.sent += 1
            size += sum(len(body) + _JOB_BYTES for _, body in self._jobs[planned:])
            if max(len(self._jobs), len(nodes)) >= AT_ONCE or size >= _PART_BYTES:
                break
        return Part(self, nodes, first) if nodes else None

    def _first_group(self, step: Partial[Any, Any]) -> Group[Any] | None:
        """Return the group that is the whole workflow or its first step."""
        if isinstance(step, Chain):
            steps = (each for each in self._flat(step) if isinstance(each, _Literal) or not self._is_skipped(each))
            return self._may_be_large(next(steps, None))
        return self._may_be_large(step)

    def _may_be_large(self, step: object) -> Group[Any] | None:
        return cast("Group[Any]", step) if is_a(step, Group) else None

    def sent(self, built: Built | None) -> Sent:
        """Return the handles of the workflow that was built and sent."""
        if self._app is None or built is None or built.id is None:
            # Callbacks of an empty group may have been sent.
            return Sent(Workflow(None, b"", (), nothing=_value_of(self._root)), None)
        workflow = Workflow[Any](self._app, built.id, built.members, built.names)
        return Sent(workflow, Job(self._app, built.id, True) if isinstance(self._step, Signature) else None)

    # The steps, from the beginning to the end.

    def _node(self, step: Partial[Any, Any], fed: _Fed, wanted: bool, depth: int) -> _Node | None:
        """Plan a step, and return its node; None if there is nothing to do. ``wanted``: whether its value is needed."""
        links = step._links
        wanted = wanted or bool(links)
        if isinstance(step, Signature):
            node: _Node | None = self._job(step, fed, wanted)
        elif is_a(step, Group):
            node = self._group(cast("Group[Any]", step), fed, wanted, depth)
        elif is_a(step, Graph):
            node = self._graph(cast("Graph", step), fed, wanted, depth)
        else:
            node = self._chain(cast("Chain[Any]", step), fed, wanted, depth)
        if not links:
            return node
        if node is None:
            self._link_nothing(links, fed, depth)
            return None
        return _Linked(node, [(self._callback(link, depth), link.when) for link in links])

    def _job(self, signature: Signature[Any], fed: _Fed, wanted: bool) -> int:
        sender = signature._sender
        self._belongs_to(sender.task.app, signature)
        takes, first = (0, _NO_ARGUMENTS) if signature.immutable else (fed.takes, fed.first)
        place = len(self._jobs)
        body = signature._body(without=takes, first=first)
        self._signatures.append(signature)
        self._jobs.append((self._options_with_result(signature) if wanted else sender._options_of_step(), body))
        self._takes.append(takes)
        if signature._mark:
            self._marks[place] = signature._mark
        elif takes > 1:
            self._marks[place] = "spread"
        return place

    def _group(self, step: Group[Any], fed: _Fed, wanted: bool, depth: int) -> _Node | None:
        if step._is_empty():
            return None
        self._check_depth(depth)
        may_grow = step is self._may_grow and fed == _FIRST
        members = step._stream() if may_grow else iter(step.steps)
        nodes: list[_Node] = []
        for member in members:
            if may_grow and max(len(self._jobs), len(nodes)) >= AT_ONCE and self._sends_parts():
                members = itertools.chain((member,), members)
                self._growing = _Growing(step, members, wanted, depth, len(nodes))
                return _Group(nodes, step.max_failures, is_growing=True)
            if len(nodes) == MOST_MEMBERS:
                raise ValueError(TOO_MANY)
            nodes.append(self._member(step, member, wanted, depth, fed))
        return _Group(nodes, step.max_failures)

    def _member(
        self, group: Group[Any], member: Partial[Any, Any], wanted: bool, depth: int, fed: _Fed = _FIRST
    ) -> _Node:
        errbacks = group._errbacks
        node = self._node(member, fed, wanted or bool(errbacks), depth + 1)
        if node is None:
            node = _Empty()
        if errbacks:
            node = _Linked(node, [(self._callback(link, depth), link.when) for link in errbacks])
        return node

    def _sends_parts(self) -> bool:
        return self._app is not None and self._app._connected().sends_parts

    def _graph(self, step: Graph, fed: _Fed, wanted: bool, depth: int) -> _Node:
        self._check_depth(depth)
        order = order_of(step)
        named = list(step._steps.values())
        is_read = [False] * len(named)
        for place in order.ends if wanted else ():
            is_read[place] = True
        for place, needs in enumerate(order.needs):
            if needs and named[place].step._takes_value():
                for other, _ in needs:
                    is_read[other] = True
        nodes: list[_Node] = []
        for place, (inner, _) in enumerate(named):
            count = len(order.needs[place])
            node = self._node(inner, _Fed(True, count) if count else fed, is_read[place], depth + 1)
            nodes.append(_Empty() if node is None else node)
        return _Graph(nodes, list(step), *order)

    def _check_depth(self, depth: int) -> None:
        if depth >= _DEEPEST:
            raise ValueError(
                f"groups are nested more than {_DEEPEST} levels deep, too deep for a job to read their values"
            )

    def _chain(self, step: Chain[Any], fed: _Fed, wanted: bool, depth: int) -> _Node | None:
        nodes: list[_Node] = []
        steps = [each for each in self._flat(step) if isinstance(each, _Literal) or not self._is_skipped(each)]
        if not steps:
            return None
        began = fed.waits
        for place, each in enumerate(steps):
            is_read = place + 1 < len(steps) and _takes_value(steps[place + 1])
            if isinstance(each, _Literal):
                node = self._literal(each, began, is_read or wanted, depth)
            else:
                given = _NEXT if nodes else fed if began else self._beginning(step, each, fed)
                node = self._node(each, given, is_read or (wanted and place + 1 == len(steps)), depth)
            if node is not None:
                nodes.append(node)
                began = True
        if not nodes:
            return None
        return nodes[0] if len(nodes) == 1 else _Sequence(nodes)

    def _flat(self, chain: Chain[Any]) -> list[Partial[Any, Any] | _Literal]:
        """Return the steps of a chain, flattening nested chords and chains that have no callbacks of their own."""
        found: list[Partial[Any, Any] | _Literal] = []
        for place, each in enumerate(chain.steps):
            if isinstance(chain, Chord) and place == 1 and chain.header._is_empty():
                found.append(_Literal(each))
            elif isinstance(each, Chain) and not each._links:
                found += self._flat(each)
            else:
                found.append(each)
        return found

    def _is_skipped(self, step: Partial[Any, Any]) -> bool:
        return step._is_empty() and not step._links

    def _beginning(self, chain: Chain[Any], step: Partial[Any, Any], fed: _Fed) -> _Fed:
        """Return the input of a chain's first step that is not skipped: ``[]`` after an empty group."""
        skipped = next((each for each in self._flat(chain) if not isinstance(each, _Literal)), step)
        return _AFTER_NOTHING if skipped is not step and not fed.waits else fed

    def _literal(self, step: _Literal, waits: bool, wanted: bool, depth: int) -> _Node | None:
        """Plan the body of a chord without members. It gets ``[]``."""
        return self._node(step.body, _Fed(waits, 0, _EMPTY_LIST), wanted, depth)

    def _callback(self, link: Link, depth: int) -> _Node:
        node = self._node(link.callback, _NEXT, False, depth)
        if node is None:
            raise ValueError("a callback without steps has nothing to run")
        if link.when == FAILED:
            self._marks[cast("int", node.node if isinstance(node, _Linked) else node)] = "errback"
        return node

    def _link_nothing(self, links: tuple[Link, ...], fed: _Fed, depth: int) -> None:
        """Plan the callbacks of an empty group, which succeeds at once with ``[]``."""
        if fed.waits:
            raise ValueError("an empty group inside a workflow is skipped, so it can't have callbacks")
        for link in links:
            if link.when == SUCCEEDED and (node := self._node(link.callback, _AFTER_NOTHING, False, depth)) is not None:
                self._loose.append(node)

    def _belongs_to(self, app: App, signature: Signature[Any]) -> None:
        if self._app is None:
            self._app = app
        elif app is not self._app:
            raise ValueError(
                f"{self._signatures[0].task.name} belongs to {self._app!r} and {signature.task.name} to {app!r}:"
                " all tasks of a workflow must belong to one app"
            )

    def _options_with_result(self, signature: Signature[Any]) -> _core.Options:
        """Return the options of a call whose result a later step reads, even if its task does not store results."""
        sender = signature._sender
        if sender._options.store_result:
            return sender._options_of_step()
        options = self._result_options.get(id(sender))
        if options is None:
            options = sender._options.with_changes({"store_result": True}).for_core()
            self._result_options[id(sender)] = options
        return options


class Part:
    """Members of a large group to send in one transaction."""

    def __init__(self, plan: Plan, nodes: list[_Node], first: int) -> None:
        self._plan = plan
        self._nodes = nodes
        self._first = first
        self._takes, self._marks = plan._takes, plan._marks
        self._jobs: Sequence[tuple[_core.Options, bytes]] = plan._jobs

    @property
    def end(self) -> int:
        """Number of members up to the last one of this part."""
        return self._first + len(self._nodes)

    def __len__(self) -> int:
        return len(self._jobs)

    def with_jobs(self, jobs: Sequence[tuple[_core.Options, bytes]]) -> None:
        """Set the jobs, with their final headers."""
        self._jobs = jobs

    def build(self) -> Built:
        """Build the graph of this part, once for each time that it is sent."""
        return _Builder(self._takes, self._marks, self._jobs).build_members(self._nodes, self._plan.join, self._first)


class _Literal(NamedTuple):
    """The body of a chord without members."""

    body: Partial[Any, Any]


def _takes_value(step: Partial[Any, Any] | _Literal) -> bool:
    return not isinstance(step, _Literal) and step._takes_value()


class Built(NamedTuple):
    """Workflow in the form that the broker receives."""

    graph: _core.Graph
    id: bytes | None
    """Id of the job or the join whose outcome is the workflow's; None if no steps are left."""
    job_ids: list[bytes]
    """Ids of the jobs, in the order of the plan."""
    members: Sequence[bytes]
    """Ids of the members of the group, or of the steps of the chain or graph."""
    names: Sequence[str] | None = None
    """Names of the steps of the graph."""
    is_new: bool = True
    """Whether this is the first time it is sent: no earlier run of the sending job has sent it."""

    @property
    def workflow_id(self) -> bytes:
        """Workflow id of its jobs. Callbacks alone have one, too."""
        return self.job_ids[0] if self.id is None else self.id


class Described(NamedTuple):
    """Steps of a built workflow, for its description."""

    root: _Node
    signatures: Sequence[Signature[Any]]
    job_ids: Sequence[bytes]
    groups: dict[int, bytes]
    """Join of each group, by the group's identity."""


class _Held(NamedTuple):
    """Join that a job waits for, the shape in which the job gets its values, and the outcome on which the job runs."""

    join: bytes
    shape: int
    when: int = SUCCEEDED
    # Whether the join's outcome is not a value, so that it can have more places.
    is_plain: bool = False


_Place: TypeAlias = tuple[bytes, int]


class _Builder:
    def __init__(
        self,
        takes: Sequence[int],
        marks: dict[int, str],
        jobs: Sequence[tuple[_core.Options, bytes]],
        depth: int = 0,
    ) -> None:
        self._takes = takes
        self._marks = marks
        self._jobs = jobs
        self.graph = _core.Graph(depth)
        self._ids: list[bytes] = [b""] * len(jobs)
        # Outcomes of groups are kept for as long as the longest-lived result.
        kept = {id(options): options for options, _ in jobs}.values()
        self._ttl_ms: int = max((options.details()["result_ttl_ms"] or 0 for options in kept), default=0) or 86_400_000
        self.groups: dict[int, bytes] = {}
        # Joins with a single member, which end as it does. Callbacks of the member may wait for them.
        self._single: set[bytes] = set()
        # Joins of groups to which their members may add others.
        self._may_grow: set[bytes] = set()
        # Ids of the steps of each graph.
        self._steps: dict[bytes, list[bytes]] = {}
        # Join of the group whose other members follow later.
        self.growing = b""

    def build(self, root: _Node | None, loose: Sequence[_Node], place: _Place | None = None) -> Built:
        for node in loose:
            self._add(node, None, None)
        if root is None:
            return Built(self.graph, None, self._ids, ())
        chain = root.node if isinstance(root, _Linked) else root
        steps: list[bytes] = []
        outcome = self._add(root, place, None, steps)
        members: Sequence[bytes] = (outcome,)
        if isinstance(chain, _Sequence):
            members = steps
            if len(steps) == 2 and is_join(steps[0]) and isinstance(_unlinked(chain.nodes[0]), _Group):
                members = MemberIds(steps[0], _size(chain.nodes[0]))
        elif isinstance(chain, _Group):
            members = MemberIds(outcome, len(chain.nodes))
        elif isinstance(chain, _Graph):
            return Built(self.graph, outcome, self._ids, self._steps[self.groups[id(chain)]], chain.names)
        return Built(self.graph, outcome, self._ids, members)

    def build_members(self, nodes: Sequence[_Node], join: bytes, first: int) -> Built:
        """Build the graph of members of an existing join, starting at index ``first``."""
        for index, node in enumerate(nodes, first):
            self._add(node, (join, index), None)
        return Built(self.graph, None, self._ids, ())

    def _add(self, node: _Node, place: _Place | None, held: _Held | None, steps: list[bytes] | None = None) -> bytes:
        """Add the parts of a node, and return the id whose result is the node's outcome.

        ``place``: where the node reports. ``held``: the join that it waits for. ``steps``: receives the outcome ids of
        a chain's steps.
        """
        if isinstance(node, int):
            return self._add_job(node, place, held)
        if isinstance(node, _Sequence):
            return self._add_sequence(node, place, held, steps)
        if isinstance(node, _Empty):
            return self._add_empty(node, place, held)
        inner, callbacks = (node.node, node.callbacks) if isinstance(node, _Linked) else (node, ())
        if isinstance(inner, (_Group, _Graph)):
            return self._add_group(inner, place, held, callbacks)
        assert isinstance(node, _Linked)
        if place is None or place[0] not in self._single:
            # A join between the step and the place that it reports to, with the outcome of the step.
            then = () if place is None else (place,)
            kind = WRAPS | (MAY_GROW if place is not None and place[0] in self._may_grow else 0)
            unit = self._join(1, 0, then, None if place is None else self._ttl_ms, kind=kind)
            outcome = self._add_linked(node, (unit, 0), held, steps)
            return outcome if place is None else _id_of(place)
        return self._add_linked(node, place, held, steps)

    def _add_linked(self, node: _Linked, place: _Place, held: _Held | None, steps: list[bytes] | None) -> bytes:
        self._add_callbacks(place[0], _ONE, node.callbacks)
        return self._add(node.node, place, held, steps)

    def _add_sequence(
        self, node: _Sequence, place: _Place | None, held: _Held | None, steps: list[bytes] | None
    ) -> bytes:
        # From the last step to the first: each needs the id of the join that it reports to.
        outcomes: list[bytes] = []
        target: _Place | bytes | None = place
        for index in range(len(node.nodes) - 1, -1, -1):
            before = node.nodes[index - 1] if index else None
            waits_for = held
            following: _Place | bytes | None = None
            if before is not None:
                if not _is_group(before) or _is_hollow(node.nodes[index]):
                    join = self._join(1, 0, (), None)
                    following, waits_for = (join, 0), _Held(join, _ONE, is_plain=True)
                else:
                    # The members report to the join that the next step waits for.
                    join = self._join_of(_unlinked(before), ())
                    following, waits_for = join, _Held(join, _LIST)
            outcomes.append(self._add_step(node.nodes[index], target, waits_for))
            target = following
        if steps is not None:
            steps.extend(reversed(outcomes))
        return outcomes[0]

    def _add_step(self, node: _Node, target: _Place | bytes | None, held: _Held | None) -> bytes:
        """Add a step of a chain. ``target``: its place; for a group, the join that its members belong to."""
        if not isinstance(target, bytes):
            return self._add(node, target, held)
        if isinstance(node, _Linked):
            self._add_callbacks(target, _LIST, node.callbacks)
        self._add_members(_unlinked(node), target, held)
        return target

    def _add_group(
        self, node: _Group | _Graph, place: _Place | None, held: _Held | None, callbacks: Sequence[tuple[_Node, int]]
    ) -> bytes:
        join = self._join_of(node, () if place is None else (place,))
        self._add_callbacks(join, _LIST, callbacks)
        self._add_members(node, join, held)
        return join if place is None else _id_of(place)

    def _add_empty(self, node: _Empty, place: _Place | None, held: _Held | None) -> bytes:
        then = () if place is None else (place,)
        waits = held is not None and held.is_plain
        join = self._join(int(waits), 0, then, self._ttl_ms, kind=EMPTY)
        if held is not None and waits:
            self.graph.also(held.join, (join, 0))
        self.groups[id(node)] = join
        return join if place is None else _id_of(place)

    def _join_of(self, node: _Node, then: Sequence[_Place]) -> bytes:
        """Add the join of a group's members, or of a graph's last steps."""
        if isinstance(node, _Graph):
            join = self._join(len(node.ends), 0, then, self._ttl_ms, kind=NAMED)
        else:
            assert isinstance(node, _Group)
            join = self._join_of_members(node, then)
        self.groups[id(node)] = join
        return join

    def _join_of_members(self, group: _Group, then: Sequence[_Place]) -> bytes:
        if not group.is_growing:
            join = self._join(len(group.nodes), group.max_failures, then, self._ttl_ms, kind=LIST | MAY_GROW)
            self._may_grow.add(join)
            return join
        creator = running_job_id()
        self.growing = self.graph.join(0, group.max_failures, then, self._ttl_ms, grows=True, creator=creator)
        return self.growing

    def _add_members(self, node: _Node, join: bytes, held: _Held | None) -> None:
        if isinstance(node, _Graph):
            return self._add_graph(node, join, held)
        assert isinstance(node, _Group)
        for index, member in enumerate(node.nodes):
            self._add(member, (join, index), held)
        return None

    def _add_graph(self, node: _Graph, join: bytes, held: _Held | None) -> None:
        """Add the steps of a graph, whose last ones are members of the join."""
        places: list[list[_Place]] = [[] for _ in node.nodes]
        for index, step in enumerate(node.ends):
            places[step].append((join, index))
        # Steps with the same needs share a join.
        waits: dict[tuple[tuple[int, int], ...], _Held] = {}
        ids = [b""] * len(node.nodes)
        # Each step comes before the steps that it needs, since these report to the join that it waits for.
        for step in reversed(node.sequence):
            needs, waits_for = node.needs[step], held
            if needs:
                known = waits.get(needs)
                if known is None:
                    expects = [(index, when) for index, (_, when) in enumerate(needs) if when != SUCCEEDED]
                    wait = self._join(len(needs), 0, (), None, expects=expects)
                    for index, (other, _) in enumerate(needs):
                        places[other].append((wait, index))
                    waits[needs] = known = _Held(wait, _ONE if len(needs) == 1 else _LIST, is_plain=True)
                waits_for = known
            ids[step] = self._add_reporting(node.nodes[step], places[step], waits_for)
        self._steps[join] = ids
        self.graph.value(names_id(join), encode_names(node.names, ids, node.ends), self._ttl_ms + _NAMES_KEPT_MS)

    def _add_reporting(self, node: _Node, places: Sequence[_Place], held: _Held | None) -> bytes:
        """Add a step that reports to any number of places."""
        if len(places) > 1:
            unit = self._join(1, 0, places, self._ttl_ms, kind=WRAPS)
            places = ((unit, 0),)
        return self._add(node, places[0] if places else None, held)

    def _add_callbacks(self, join: bytes, shape: int, callbacks: Sequence[tuple[_Node, int]]) -> None:
        for callback, when in callbacks:
            self._add(callback, None, _Held(join, shape, when))

    def _add_job(self, number: int, place: _Place | None, held: _Held | None) -> bytes:
        options, body = self._jobs[number]
        mark = self._marks.get(number)
        if held is None:
            job_id = self.graph.job(options, body, place=place, mark=mark)
        else:
            join, shape, when, _ = held
            given = shape if self._takes[number] else None
            job_id = self.graph.job(options, body, place=place, held_by=join, shape=given, when=when, mark=mark)
        self._ids[number] = job_id
        return job_id

    def _join(
        self,
        count: int,
        max_failures: int,
        then: Sequence[_Place],
        ttl_ms: int | None,
        *,
        kind: int = LIST,
        expects: Sequence[tuple[int, int]] = (),
    ) -> bytes:
        join = self.graph.join(count, max_failures, then, ttl_ms, kind=kind, expects=expects)
        if count == 1 and max_failures == 0 and not expects and kind != LIST | MAY_GROW:
            self._single.add(join)
        return join


def _unlinked(node: _Node) -> _Node:
    return node.node if isinstance(node, _Linked) else node


def _is_group(node: _Node) -> bool:
    return isinstance(_unlinked(node), (_Group, _Graph))


def _size(node: _Node) -> int:
    group = _unlinked(node)
    assert isinstance(group, _Group)
    return len(group.nodes)


def _is_hollow(node: _Node) -> bool:
    """Whether a node contains no job, only empty groups."""
    inner = _unlinked(node)
    if isinstance(inner, _Group):
        return all(map(_is_hollow, inner.nodes))
    return isinstance(inner, _Empty)


def _value_of(node: _Node | None) -> Any:
    """Return the value of a node without jobs."""
    return [_value_of(each) for each in node.nodes] if isinstance(node, _Group) else []


def _place_of(job_id: bytes) -> _Place:
    return job_id[:13] + bytes(3), int.from_bytes(job_id[13:], "big") - 1


def _id_of(place: _Place) -> bytes:
    join, index = place
    return join[:13] + (index + 1).to_bytes(3, "big")
