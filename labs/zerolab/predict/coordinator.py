"""Which parameters are gathered, kept and released: DeepSpeed's `PartitionedParameterCoordinator`, without tensors.

The method names are those of deepspeed/runtime/zero/partitioned_param_coordinator.py, so that the two can be read side by side.
The first micro-step records the order of modules (a prefetcher needs one); every later one uses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import accumulate

from .gathered import Gathered
from .moduletrace import ModuleTrace
from .steps import ACCESS, FETCH, PREFETCH

AVAILABLE, PARTITIONED, INFLIGHT = 0, 1, 2
NEVER = -(10**10)


class Unpredictable(ValueError):
    """DeepSpeed does something here that this prediction does not follow, or fails itself. The message says what and why."""


class Handle:
    """One call of all_gather_coalesced. Waiting for one of its parameters makes all of them available."""

    def __init__(self, params: list[int]):
        self.params, self.complete = params, False


class Coordinator:
    """State of all parameters of a model, and the rules that change it.

    trace: the model. gather(params, why): called for every all-gather that is issued, before its parameters count as available.
    persist: parameters with `ds_persist`. prefetch, max_live, max_reuse: elements. gathered: keeps account of the bytes.
    waits(params): called when a module's parameters must have arrived, before it prefetches.
    """

    def __init__(
        self,
        trace: ModuleTrace,
        persist: Iterable[int],
        prefetch: int,
        max_live: int,
        max_reuse: int,
        gather: Callable,
        gathered: Gathered,
        waits: Callable = lambda params: None,
    ):
        self.gathered, self.waits = gathered, waits
        self.numel = [p.elements for p in trace.parameters]
        self.trainable = [p.trainable for p in trace.parameters]
        self.own = [sorted(set(m.parameters)) for m in trace.modules]
        self.external: list[list[int]] = [[] for _ in trace.modules]
        self.persist = frozenset(persist)
        self.prefetch, self.max_live, self.max_reuse = prefetch, max_live, max_reuse
        self.gather = gather

        n = len(self.numel)
        self.status = [PARTITIONED] * n
        self.active: list[set[int]] = [set() for _ in range(n)]  # ds_active_sub_modules
        self.recomputed: dict[int, set[int]] = defaultdict(set)  # module -> ds_recompute_parameters
        self.active_backward: dict[int, None] = {}
        self.inflight: dict[int, Handle] = {}
        self.resident = 0  # elements gathered or being gathered
        self.n_available = 0  # DeepSpeed's own count of the same, which it resets before every forward
        self.step_id = 0

        self.complete = False
        self.recorded: list[int] | None = None  # module order of the first micro-step, None before it begins
        self.queue: deque[tuple[int, int]] = deque()
        self.param_order: list[tuple[int, int]] = []
        self.last_fetched: dict[int, int] = {}
        self.release_cache: dict[tuple[int, int], set[int]] = {}

    def iter_params(self, module: int) -> list[int]:
        return self.own[module] + self.external[module] if self.external[module] else self.own[module]

    # --- once a micro-step ---

    def reset_step(self) -> list[int]:
        """Before every forward. Returns the lengths of the lists that ranks compare (two broadcasts each)."""
        for param, handle in self.inflight.items():
            self._wait(handle)
            self._release_param(param)
            self.gathered.forgotten(handle)
        self.inflight.clear()
        compared: list[int] = []
        if not self.complete:
            compared.append(len(self.recorded or ()))
            if self.recorded is None:
                self.recorded = []
            else:
                self._construct_parameter_trace()
                compared += [len(self.param_order)] * 2
                self.complete = True
        self.queue = deque(self.param_order)
        self.last_fetched = {}
        self.step_id = 0
        self.n_available = 0
        return compared

    def _construct_parameter_trace(self) -> None:
        order = self.recorded
        self.param_order = [(p, i) for i, m in enumerate(order) for p in sorted(self.iter_params(m))]
        self._index_reuse()

    def _index_reuse(self) -> None:
        """For the reuse distance: where each parameter occurs, and how many elements lie before each module."""
        order = self.recorded
        self.distance = [0, *accumulate(sum(self.numel[p] for p in self.iter_params(m)) for m in order)]
        self.occurs: dict[int, list[int]] = defaultdict(list)
        for i, m in enumerate(order):
            for p in self.iter_params(m):
                self.occurs[p].append(i)

    # --- fetch ---

    def fetch_sub_module(self, module: int, forward: bool, recompute: bool = False) -> None:
        if not self.complete:
            self.recorded.append(module)
        elif self.step_id >= len(self.recorded) or self.recorded[self.step_id] != module:
            raise Unpredictable("the order of modules differs between micro-steps: DeepSpeed drops its trace and starts over")
        if not forward:
            self.active_backward[module] = None
        params = self.iter_params(module)
        self._all_gather([p for p in params if self.status[p] == PARTITIONED], FETCH)
        for p in params:
            self.active[p].add(module)
            if recompute and self.active_backward and not self.trainable[p]:
                owner = next(reversed(self.active_backward))
                self.recomputed[owner].add(p)
                self.active[p].add(owner)
            self._wait_for(p)
            if self.status[p] != AVAILABLE:
                raise Unpredictable(f"DeepSpeed fails: parameter {p} is needed while its gather is lost")
        self.waits(params)
        if self.complete:
            self._prefetch(params)
        self.step_id += 1

    def _prefetch(self, params: list[int]) -> None:
        queue, last = self.queue, self.last_fetched
        wanted = {p for p in params if last.get(p, NEVER) < self.step_id}
        dropped: set[int] = set()
        while queue and len(dropped) < len(wanted):
            param, last_used = queue.popleft()
            last[param] = last_used
            dropped.add(param)
        if dropped != wanted:
            raise Unpredictable("DeepSpeed fails: its fetch queue does not match the module ('tracing error at step ...')")
        if self.prefetch <= 0:
            return
        room = min(self.max_live - self.n_available, self.prefetch)
        chosen: dict[int, None] = {}
        elements = 0
        while queue and elements < room:
            param, last_used = queue.popleft()
            last[param] = max(last.get(param, NEVER), last_used)
            if self.status[param] == PARTITIONED and param not in chosen:
                chosen[param] = None
                elements += self.numel[param]
        if elements > 0:
            self._all_gather(list(chosen), PREFETCH)

    def _all_gather(self, params: list[int], why: str) -> None:
        if not params:
            return
        params.sort()  # all_gather_coalesced sorts by ds_id, so the order in which Python's sets yield them does not matter
        self.gather(params, why)
        elements = sum(self.numel[p] for p in params)
        self.n_available += elements
        self.resident += elements
        handle = Handle(params)
        self.gathered.issued(handle)
        for p in params:
            if p in self.inflight:
                raise Unpredictable(f"DeepSpeed fails: parameter {p} is gathered twice ('already in registry')")
            self.status[p] = INFLIGHT
            self.inflight[p] = handle

    def _wait_for(self, param: int) -> None:
        handle = self.inflight.pop(param, None)
        if handle:
            self._wait(handle)
            self.gathered.forgotten(handle)

    def _wait(self, handle: Handle) -> None:
        if not handle.complete:
            self.gathered.waited(handle)
            for p in handle.params:
                self.status[p] = AVAILABLE
            handle.complete = True

    def access(self, module: int, param: int) -> None:
        """A parameter read outside its module: gathered alone if it is away, and from then on a parameter of the reader too."""
        if self.status[param] == INFLIGHT:
            raise Unpredictable(
                f"parameter {param} is read outside its module while its gather is under way: its values are undefined"
            )
        if self.status[param] == PARTITIONED:
            if param not in self.external[module] and param not in self.own[module]:
                self.external[module].append(param)
                if self.complete:
                    self._index_reuse()
            self.gather_now(param, ACCESS)

    def gather_now(self, param: int, why: str) -> None:
        """param.all_gather(): at once and uncounted by DeepSpeed's own n_available."""
        self.gather([param], why)
        self.status[param] = AVAILABLE
        self.resident += self.numel[param]
        self.gathered.alone(param)

    # --- release ---

    def release_sub_module(self, module: int, forward: bool) -> None:
        params = self.iter_params(module)
        release = self._params_to_release(module) if self.complete else set(params)
        if not forward:
            if not self.active_backward:
                raise Unpredictable(
                    "DeepSpeed fails: a module's backward ends before any began ('active_backward_submodules is empty')"
                )
            recomputed = self.recomputed.pop(module, set())
            release.update(p for p in recomputed if p not in self.persist)  # DeepSpeed changes its cached set too
            params = [*params, *recomputed]
            self.active_backward.pop(module, None)
        for p in dict.fromkeys(params):
            self.active[p].discard(module)
            if p in release:
                self._release_param(p)

    def _params_to_release(self, module: int) -> set[int]:
        """Kept by DeepSpeed in an lru_cache: what the first micro-step with a trace decides holds for all later ones."""
        key = module, self.step_id
        if key not in self.release_cache:
            self.release_cache[key] = {
                p
                for p in self.iter_params(module)
                if p not in self.persist and self.last_fetched.get(p, NEVER) <= self.step_id and not self._reused_soon(p)
            }
        return self.release_cache[key]

    def _reused_soon(self, param: int) -> bool:
        """Whether one of the next modules, up to max_reuse elements away, needs it. (A search, DeepSpeed walks.)"""
        occurs = self.occurs[param]
        at = bisect_left(occurs, self.step_id)
        return at < len(occurs) and self.distance[occurs[at]] - self.distance[self.step_id] < self.max_reuse

    def _release_param(self, param: int) -> None:
        if self.status[param] == AVAILABLE and not self.active[param]:
            self.status[param] = PARTITIONED
            self.n_available -= self.numel[param]
            self.resident -= self.numel[param]
            self.gathered.released(param)

    def release_backward_leftovers(self) -> None:
        """After every backward: modules whose post-backward hook never came, since their input needs no gradient."""
        while self.active_backward:
            module, _ = self.active_backward.popitem()
            for p in dict.fromkeys([*self.iter_params(module), *self.recomputed.pop(module, ())]):
                self.active[p].discard(module)
                if p not in self.persist:
                    self._release_param(p)

    def release_and_reset_all(self) -> None:
        """Before the optimizer: everything goes, persistent parameters too."""
        for p in range(len(self.status)):
            self._wait_for(p)
            self.active[p].clear()
            self._release_param(p)

    # --- to recognise a micro-step that begins like an earlier one ---

    def state(self) -> tuple:
        return (
            tuple(self.status),
            tuple((p, frozenset(a)) for p, a in enumerate(self.active) if a),
            tuple((m, frozenset(s)) for m, s in sorted(self.recomputed.items()) if s),
            tuple(len(e) for e in self.external),
            self.gathered.state(),
        )

    def restore(self, state: tuple) -> None:
        """Back to a `state()` at the end of a micro-step (externals only ever grow, and are part of the comparison)."""
        status, active, recomputed, _, gathered = state
        self.gathered.restore(gathered)
        self.status = list(status)
        for a in self.active:
            a.clear()
        for p, modules in active:
            self.active[p] = set(modules)
        self.recomputed = defaultdict(set, {m: set(s) for m, s in recomputed})
        self.resident = sum(n for n, s in zip(self.numel, self.status) if s != PARTITIONED)
