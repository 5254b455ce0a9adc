#!/usr/bin/env python3
# tools/plot_users.py - one picture per recipe from the files that tests/nine.c writes.
#
# Responsible for: reading nine_RECIPE.json files, refusing points of several recipes on one curve,
# a PNG for each file and, of several, an overview in which every recipe is a curve of its own.
# Not responsible for: measuring.
#
# Usage: plot_users.py [--check] [--out DIR] FILE...; --check reads and refuses, and draws nothing.
# Exit status: 0, 1 matplotlib is not installed, 2 usage or an unreadable file, 3 refused.
import json
import os
import sys

GIB = 1073741824.0
# From most bits to fewest, as a ladder goes down.
TIERS = ("BF16", "K8V8", "FP8", "K8I4", "K8V4", "K6V4", "K8V3", "K6V3", "K8V2", "K6V2")
FAMILIES = ("bf16", "fp8", "v1", "v2", "v3")


def stop(status, text):
    print("plot_users: " + text, file=sys.stderr)
    sys.exit(status)


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            curve = json.load(file)
        recipe, points = curve["recipe"], curve["points"]
        for point in points:
            for name in ("users", "p50_ms", "p99_ms", "tokens_s", "tokens_s_user", "kv_bytes"):
                float(point[name])
            dict(point["blocks_by_tier"])
            if point["recipe"] != recipe:
                stop(3, "%s: points of recipes %s and %s are never joined"
                     % (path, recipe, point["recipe"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(2, "%s: no curve of tests/nine.c: %s" % (path, error))
    if not points:
        stop(2, "%s: no points" % path)
    return curve


def refuse_twins(curves):
    seen = {}
    for path, curve in curves:
        if curve["recipe"] in seen:
            stop(3, "%s and %s are both recipe %s: two runs are never joined"
                 % (seen[curve["recipe"]], path, curve["recipe"]))
        seen[curve["recipe"]] = path
        for name in ("device", "model", "tokens", "commit"):
            if curve[name] != curves[0][1][name]:
                stop(3, "%s: another %s than %s: figures of two runs are never joined"
                     % (path, name, curves[0][0]))


def column(curve, name):
    return [point[name] for point in curve["points"]]


def prepare(axis, curve, title, unit):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("users of {:,} tokens, awake at once".format(curve["tokens"]))
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)


def finish(plot, figure, curve, what, path, right=1.0):
    figure.suptitle("%s: %s on %s\nseed %d, commit %s, %s"
                    % (what, curve["model"], curve["device"], curve["seed"], curve["commit"],
                       curve["date"][:10]), fontsize=10)
    figure.tight_layout(rect=(0, 0, right, 1))
    figure.savefig(path, dpi=120)
    plot.close(figure)
    print(path)


def draw_steps(axis, curve):
    users = column(curve, "users")
    axis.plot(users, column(curve, "p50_ms"), marker="o", color="C0", label="p50")
    axis.plot(users, column(curve, "p99_ms"), marker=".", color="C0", linestyle=":", label="p99")
    if "floor_ms" in curve["points"][0]:
        axis.plot(users, column(curve, "floor_ms"), color="black", linestyle="--",
                  label="floor: weights and KV at the\ncopy rate of this device")
    prepare(axis, curve, "decode step of all users", "ms")
    axis.legend(fontsize=8)


def draw_tokens(axis, curve):
    users = column(curve, "users")
    axis.plot(users, column(curve, "tokens_s"), marker="o", color="C2", label="in all")
    axis.plot(users, column(curve, "tokens_s_user"), marker="s", color="C1", label="of each user")
    prepare(axis, curve, "tokens decoded", "tokens a second")
    axis.legend(fontsize=8)


# Blocks of each tier, as parts of the bytes that all of them have.
def draw_pool(axis, curve):
    points = curve["points"]
    places = range(len(points))
    below = [0.0] * len(points)
    for tier in TIERS:
        share = []
        for point in points:
            blocks = point["blocks_by_tier"]
            share.append(100.0 * blocks.get(tier, 0) / max(1, sum(blocks.values())))
        if any(share):
            axis.bar(places, share, bottom=below, color="C%d" % TIERS.index(tier), width=0.6,
                     label=tier)
            below = [low + more for low, more in zip(below, share)]
    for place, point in zip(places, points):
        axis.text(place, 102, "%.3g GiB" % (point["kv_bytes"] / GIB), ha="center", fontsize=8)
    prepare(axis, curve, "blocks by tier; KV in the pool of %.3g GiB"
            % (curve["pool_bytes"] / GIB), "% of sealed blocks")
    axis.set_xticks(list(places), [str(point["users"]) for point in points])
    axis.set_ylim(0, 125)
    axis.legend(fontsize=8, ncol=4, loc="upper center")


def draw_one(plot, curve, path):
    figure, axes = plot.subplots(1, 3, figsize=(13, 4.4))
    draw_steps(axes[0], curve)
    draw_tokens(axes[1], curve)
    for axis in axes[:2]:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    draw_pool(axes[2], curve)
    needles = curve["needles"]
    what = "recipe %s, needles %d of %d right" % (curve["recipe"], needles["right"],
                                                  needles["asked"])
    if "needles_kept" in curve:
        kept = curve["needles_kept"]
        what += ", kept (they can fail) %d of %d" % (kept["kept"], kept["asked"])
    if curve["users_largest"] < curve["users_wanted"]:
        what += ", the pool is full at %d users" % curve["users_largest"]
    finish(plot, figure, curve, what, path)


# A family has a colour, its members a mark each.
def style_of(curve, curves):
    family = curve["recipe"].split("-")[0]
    members = [other["recipe"] for other in curves if other["recipe"].split("-")[0] == family]
    colour = "C%d" % FAMILIES.index(family) if family in FAMILIES else "black"
    at = members.index(curve["recipe"])
    return {"color": colour, "marker": "osD^vP*X<>"[at % 10], "linestyle": ("-", "--", ":")[at % 3]}


def draw_overview(plot, curves, path):
    figure, axes = plot.subplots(1, 3, figsize=(15, 5.4))
    for curve in curves:
        users, style = column(curve, "users"), style_of(curve, curves)
        axes[0].plot(users, column(curve, "p50_ms"), label=curve["recipe"], **style)
        axes[1].plot(users, column(curve, "tokens_s"), **style)
        axes[2].plot(users, [point["kv_bytes"] / GIB for point in curve["points"]], **style)
    prepare(axes[0], curves[0], "decode step of all users, p50", "ms")
    prepare(axes[1], curves[0], "tokens decoded in all", "tokens a second")
    prepare(axes[2], curves[0], "KV of all users", "GiB")
    axes[2].axhline(curves[0]["pool_bytes"] / GIB, color="black", linestyle="--", linewidth=1)
    axes[2].text(0.1, curves[0]["pool_bytes"] / GIB, "the pool", va="bottom", fontsize=8)
    for axis in axes:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    figure.legend(loc="center right", fontsize=8, title="recipe")
    finish(plot, figure, curves[0], "every recipe a curve of its own", path, 0.88)


def main(arguments):
    usage = "usage: plot_users.py [--check] [--out DIR] FILE..."
    paths, out, check = [], None, False
    while arguments:
        word = arguments.pop(0)
        if word == "--check":
            check = True
        elif word == "--out" and arguments:
            out = arguments.pop(0)
        elif word.startswith("--"):
            stop(2, usage)
        else:
            paths.append(word)
    if not paths:
        stop(2, usage)
    curves = [(path, read(path)) for path in paths]
    refuse_twins(curves)
    if check:
        return
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        stop(1, "matplotlib is not installed: python3 -m pip install matplotlib; "
                "the JSON files have every figure")
    folder = out or os.path.dirname(paths[0]) or "."
    for path, curve in curves:
        draw_one(pyplot, curve, os.path.join(folder, "nine_%s.png" % curve["recipe"]))
    draw_overview(pyplot, [curve for _, curve in curves], os.path.join(folder, "nine_overview.png"))


main(sys.argv[1:])
