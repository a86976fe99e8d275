"""Expected acceptance length of proposals above temperature 0, offline, on the demo pair.

    python launch/proposals.py --temperatures 0.3 0.7 1.0 1.5 --nodes 8 16 32

Answers y are sampled from the target. Given that y is what comes out, the draws of a random child of law
q follow: it is y and accepted with min(1, q(y) / p(y)), else it is drawn from (q - p)+. So the trees that
the package builds with these draws are those that a server would have built on its way to y.
Printed are the tokens per verify pass, the bonus token included, over passes whose whole block lies inside
the answer; each half of the answers on its own, and the standard error over answers.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from teacher import PROMPTS, Places, Teacher
from torch import Tensor

from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.tree.build import Tree, build_tree
from dflash2_sglang.tree.draw import Draws, Found, draw_search, lattice_heat
from dflash2_sglang.tree.lattice import Lattice, build_lattice

STARTS = 8  # walks over each answer, from neighbouring places


def lattice_of(
    places: Places, temperature: float, *, selector: bool = True, own: bool = False
) -> Lattice:
    """Rows at the temperature that the package drafts with, or at the request's own."""
    heat = torch.full((len(places.answer),), temperature)
    pair = places.pair if selector else None
    norm = places.log_norm[..., 0 if own else 1]
    return build_lattice(
        places.tokens, places.unary, norm, heat if own else lattice_heat(heat), pair
    )


def fixed_tree(places: Places, lattice: Lattice, nodes: int, children: int) -> Tree:
    return build_tree(lattice, places.anchor, nodes, children)


def drawn_tree(places: Places, lattice: Lattice, heat: float, nodes: int, children: int) -> Tree:
    """The tree with random children, its draws made given the answer, one depth after the other."""
    size, depth = places.truth.shape
    coins = torch.rand(size, depth, nodes - 1)
    draws = Draws(coins, torch.zeros(size, dtype=torch.bool), heat=torch.full((size,), heat))
    true, start = torch.ones(size, 1, dtype=torch.bool), 0
    for level in range(min(depth, nodes - 1)):
        part = Lattice(*(field[:, : level + 1] for field in lattice))
        found = draw_search(part, nodes, children, draws)
        count = found.levels[level].row.shape[1]
        if level:
            above = found.levels[level].parent - (start - found.levels[level - 1].row.shape[1])
            token = part.tokens.take(found.levels[level].row - part.tokens.shape[2])
            true = true.gather(1, above) & (token == places.truth[:, level - 1 : level])
        given = coins_given_truth(places, part.tokens, found, level, start)
        coins[:, level, :count] = torch.where(true, given, coins[:, level, :count])
        start += count
    return build_tree(lattice, places.anchor, nodes, children, draws)


def coins_given_truth(
    places: Places, tokens: Tensor, found: Found, level: int, start: int
) -> Tensor:
    """[A, F] coins with which each node of the level draws as if the true token followed it."""
    end = start + found.levels[level].row.shape[1]
    law, rows = found.law[:, start:end].double(), found.rows[:, start:end]
    candidate = rows % tokens.shape[2]
    log_p = places.target[:, level].unsqueeze(1).expand_as(law).gather(2, candidate)
    truth = places.truth[:, level].view(-1, 1, 1)
    is_truth = tokens.take(rows - tokens.shape[2]) == truth
    chance = (
        law.masked_fill(~is_truth, 0).sum(2) / places.target_of[:, level].double().exp()[:, None]
    )
    accepted = torch.rand(chance.shape) < chance
    refused = (law - log_p.double().exp()).clamp(min=0) + 1e-12 * law
    drawn = (refused / torch.empty_like(refused).exponential_()).argmax(2)
    rank = torch.where(accepted, is_truth.int().argmax(2), drawn).unsqueeze(2)
    return (law.cumsum(2).gather(2, rank) - law.gather(2, rank) / 2).squeeze(2).float()


def gains(places: Places, tree: Tree) -> Tensor:
    """[A] tokens that each place's pass delivers: the nodes on the true path, and one more."""
    truth = torch.cat((places.anchor.unsqueeze(1), places.truth), 1)
    wrong = tree.tokens != truth.gather(1, tree.depth)
    return (~(tree.mask & wrong.unsqueeze(1)).any(2)).sum(1)


def walks(places: Places, gain: Tensor) -> dict[int, tuple[int, int]]:
    """(tokens, passes) of each answer when passes follow on each other."""
    places_of: dict[int, list[int]] = defaultdict(list)
    for answer, tokens in zip(places.answer.tolist(), gain.tolist(), strict=True):
        places_of[answer].append(tokens)
    out = {}
    for answer, found in places_of.items():
        total = passes = 0
        for start in range(min(STARTS, len(found))):
            at = start
            while at < len(found):
                total, passes, at = total + found[at], passes + 1, at + found[at]
        out[answer] = (total, passes)
    return out


def mean_and_error(per_answer: list[tuple[int, int]]) -> tuple[float, float]:
    """Ratio of the sums, and its standard error with answers as the units."""
    total, passes = (sum(part) for part in zip(*per_answer, strict=True))
    mean = total / passes
    spread = sum((t - mean * p) ** 2 for t, p in per_answer)
    return mean, spread**0.5 / passes


Method = Callable[[Places, float, int], Tree]


def methods(children: int) -> dict[str, Method]:
    def chain(selector: bool) -> Method:
        def build(places: Places, heat: float, nodes: int) -> Tree:
            lattice = lattice_of(places, heat, selector=selector)
            depth = places.truth.shape[1]
            return drawn_tree(places, lattice, heat, min(nodes, depth + 1), 1)

        return build

    return {
        "fixed tree, own temperature": lambda p, t, n: fixed_tree(
            p, lattice_of(p, t, own=True), n, children
        ),
        "fixed tree": lambda p, t, n: fixed_tree(p, lattice_of(p, t), n, children),
        "sampled chain, selector": chain(True),
        "sampled chain, unary": chain(False),
        "tree with random children": lambda p, t, n: drawn_tree(
            p, lattice_of(p, t), t, n, children
        ),
    }


def measure(places: Places, heat: float, nodes: int, method: Method, draws: int) -> dict:
    per_answer: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    torch.manual_seed(5)
    for _ in range(draws):
        for answer, (t, n) in walks(places, gains(places, method(places, heat, nodes))).items():
            per_answer[answer] = (per_answer[answer][0] + t, per_answer[answer][1] + n)
    halves = [[v for k, v in per_answer.items() if k % 2 == side] for side in (0, 1)]
    mean, error = mean_and_error(list(per_answer.values()))
    return {"mean": mean, "error": error, "halves": [mean_and_error(h)[0] for h in halves]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--children", type=int, default=8)
    parser.add_argument("--prompts", type=Path, help="a JSON list of texts or of {prompt: text}")
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--draws", type=int, default=4)
    args = parser.parse_args()
    prompts = PROMPTS
    if args.prompts:
        found = json.loads(args.prompts.read_text())
        prompts = [x if isinstance(x, str) else x["prompt"] for x in found]
    teacher = Teacher(ensure_demo_model(), demo_drafter())
    print("| temperature | nodes | proposal | tokens a pass | even, odd answers |")
    print("|---|---|---|---|---|")
    for heat in args.temperatures:
        drafting = float(lattice_heat(torch.tensor(heat)))
        places = teacher.places(prompts, heat, args.length, (heat, drafting))
        for nodes in args.nodes:
            for name, method in methods(args.children).items():
                if "chain" in name and nodes != args.nodes[0]:
                    continue  # no longer than the block, whatever the nodes
                draws = 1 if name.startswith("fixed") else args.draws
                r = measure(places, heat, nodes, method, draws)
                halves = ", ".join(f"{x:.3f}" for x in r["halves"])
                print(
                    f"| {heat} | {nodes} | {name} | {r['mean']:.3f} ± {r['error']:.3f} | {halves} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
