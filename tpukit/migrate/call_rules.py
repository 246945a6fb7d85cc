"""Rules for calls of which more changes than the name: the launch, the optimizer of transformers, Lightning's Trainer.

Each returns what the call is today, or a text that says why only a person can know.
"""

from collections.abc import Callable, Sequence

import libcst as cst

from tpukit.migrate.old_cells import OF_SPAWN, by_name, code

_SPACE = cst.SimpleWhitespace("")
_NONE = cst.MaybeSentinel.DEFAULT
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def keyword(name: str, value: str) -> cst.Arg:
    """Return an argument that is given by keyword."""
    return cst.Arg(cst.parse_expression(value), cst.Name(name), equal=cst.AssignEqual(_SPACE, _SPACE))


def joined(args: Sequence[cst.Arg], last: cst.Arg | None) -> list[cst.Arg]:
    """Return arguments with a comma between each two, and behind the last what stood behind the old last one."""
    spaced = [one if isinstance(one.comma, cst.Comma) else one.with_changes(comma=_COMMA) for one in args]
    spaced = [one.with_changes(whitespace_after_arg=_SPACE) for one in spaced]
    end = {"comma": last.comma, "whitespace_after_arg": last.whitespace_after_arg} if last else {"comma": _NONE}
    return [*spaced[:-1], *(one.with_changes(**end) for one in spaced[-1:])]


def without(items: Sequence, gone: set) -> list:
    """Return arguments, or the names of an import, without some; a comment behind one of these stays where it is."""
    kept = []
    for one in items:
        if one not in gone:
            kept.append(one)
        elif kept and (behind := _comments(one)):
            before = kept[-1].comma if isinstance(kept[-1].comma, cst.Comma) else _COMMA
            space = before.whitespace_after
            if isinstance(space, cst.ParenthesizedWhitespace):
                lines = [
                    *space.empty_lines,
                    *(cst.EmptyLine(whitespace=space.last_line, comment=text) for text in behind),
                ]
                space = space.with_changes(empty_lines=lines)
            else:
                space = one.comma.whitespace_after
            kept[-1] = kept[-1].with_changes(comma=before.with_changes(whitespace_after=space))
    return kept


def _comments(item: cst.CSTNode) -> list[cst.Comment]:
    space = getattr(item.comma, "whitespace_after", None)
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return []
    return [one.comment for one in (space.first_line, *space.empty_lines) if one.comment]


def launch(call: cst.Call, kit: Callable[[], str]) -> cst.Call | str:
    """Return `tpukit.launch` of the same function, in place of `xmp.spawn`; `kit` imports tpukit and says as what."""
    if any(one.star for one in call.args):
        return "its arguments are made elsewhere"
    given = by_name(call, OF_SPAWN)
    if "fn" not in given:
        return "it names no function"
    if "join" in given and code(given["join"].value) != "True":
        return "join=False has no counterpart: a launch returns when all cores are done"
    first, args = given["fn"], given.get("args")
    own_name = kit()
    old_rank = cst.parse_expression(f"{own_name}.on_old_rank(fn)")
    wrapped = old_rank.with_changes(args=[cst.Arg(first.value)])
    gone = {one for name, one in given.items() if name not in ("fn", "args")}
    one_core = "nprocs" in given and code(given["nprocs"].value) == "1"
    new: list[cst.Arg] = []
    for one in without(call.args, gone - ({given["nprocs"]} if one_core else set())):
        own = next(old for old in call.args if old.value is one.value)
        if own is first:
            new.insert(0, one.with_changes(value=wrapped, keyword=None, equal=_NONE))
        elif own is args and isinstance(one.value, cst.Tuple | cst.List):
            passed = [_argument(element) for element in one.value.elements]
            new += [*passed[:-1], *(last.with_changes(comma=one.comma) for last in passed[-1:])]
        elif own is args:
            new.append(cst.Arg(one.value, star="*", comma=one.comma))
        else:
            new.append(keyword("cores", "1").with_changes(comma=one.comma))
    new = joined([*new, keyword("backend", '"xla"')], call.args[-1])
    return call.with_changes(func=cst.parse_expression(f"{own_name}.launch"), args=new)


def _argument(element: cst.BaseElement) -> cst.Arg:
    star = "*" if isinstance(element, cst.StarredElement) else ""
    return cst.Arg(element.value, star=star, comma=element.comma)


def adamw(call: cst.Call) -> cst.Call | str:
    """Return torch's AdamW with the defaults that the one of transformers had."""
    given = by_name(call, ("params", "lr", "betas", "eps", "weight_decay", "correct_bias"))
    if "correct_bias" in given and code(given["correct_bias"].value) != "True":
        return "correct_bias=False has no counterpart in torch.optim"
    args = without(call.args, {given[name] for name in ("correct_bias", "no_deprecation_warning") if name in given})
    args += [keyword(name, value) for name, value in (("eps", "1e-6"), ("weight_decay", "0.0")) if name not in given]
    return call.with_changes(args=joined(args, call.args[-1] if call.args else None))


def scheduler(call: cst.Call) -> cst.Call | None:
    """Return a scheduler of torch without `verbose`, which none takes any more; None where it is not given."""
    gone = {one for one in call.args if one.keyword and one.keyword.value == "verbose"}
    return call.with_changes(args=joined(without(call.args, gone), call.args[-1])) if gone else None


def trainer(call: cst.Call) -> cst.Call | None:
    """Return Lightning's Trainer with the arguments of today; None where it has no old ones."""
    old = [one for one in call.args if one.keyword and one.keyword.value in ("tpu_cores", "num_tpu_cores")]
    has = {one.keyword.value for one in call.args if one.keyword}
    args: list[cst.Arg] = []
    for one in without(call.args, {one for one in old if code(one.value) == "None"}):
        if one.keyword and one.keyword.value in ("tpu_cores", "num_tpu_cores"):
            args += [keyword("accelerator", '"tpu"')] if "accelerator" not in has else []
            one = one.with_changes(keyword=cst.Name("devices"))
        args.append(one)
    return call.with_changes(args=joined(args, call.args[-1])) if old else None
