"""`meshwright plan FILE|RUN`: print an existing plan again."""

from __future__ import annotations

import json
import shlex

from meshwright.cli.plan.args import Args
from meshwright.cli.plan.exchange import export_plan, read_export
from meshwright.cli.plan.screen import print_details, print_head, print_why
from meshwright.cli.typed import check_all_read
from meshwright.options.values import read_count, read_price
from meshwright.pictures.text import folded, next_line
from meshwright.planning.plan import Plan
from meshwright.planning.why.training_run import training_run


def print_kept(args: Args, plan: Plan) -> int:
    """Print the plan of the file or run `args.model`. Return 1 if it does not fit, else 0."""
    export = read_export(args.output.export)
    where, as_json = f"with {args.model}, which is already planned", args.output.json
    code = 0 if plan.predicted.fits else 1
    if as_json:
        check_all_read(args, f"{where}, and --json")
        export_plan(plan, export, as_json=True)
        print(json.dumps(plan.to_json(), indent=2))
        return code
    tokens = None if args.search.tokens is None else read_count("--tokens", args.search.tokens)
    price = None if tokens is None or args.search.price is None else read_price(args.search.price)
    is_explained, with_ops = args.output.explain, args.output.ops
    check_all_read(args, where)
    print_head(plan)
    print_why(plan, is_explained=is_explained)
    if tokens is not None:
        print(folded(f"run: {training_run(plan.predicted, plan.system.num_chips, tokens, price)}"))
    print_details(plan, is_explained=is_explained)
    if with_ops:
        from meshwright.cli.plan.ops import print_ops

        print_ops(plan)
    export_plan(plan, export)
    if plan.planned_only:
        print(folded(f"train: {plan.planned_only}"))
    else:
        print(next_line(f"meshwright verify {shlex.quote(args.model)}", f"meshwright show {shlex.quote(args.model)}"))
    return code
