#!/usr/bin/env python3
# tools/plot_users.py - one picture per recipe from the files that tests/nine.c writes.
#
# Responsible for: reading nine_RECIPE.json files, refusing points of several recipes on one curve,
# a PNG for each file and an overview in which every recipe is a curve of its own.
# Not responsible for: measuring.
#
# Usage: plot_users.py [--check] [--out DIR] FILE...; --check reads and refuses, and draws nothing.
# Exit status: 0, 1 matplotlib is not installed, 2 usage or an unreadable file, 3 refused.
import json
import os
import sys


def stop(status, text):
    print("plot_users: " + text, file=sys.stderr)
    sys.exit(status)


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            curve = json.load(file)
        recipe, points = curve["recipe"], curve["points"]
        for point in points:
            for name in ("users", "p50_ms", "p99_ms", "tokens_s", "tokens_s_user"):
                float(point[name])
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


def draw(plot, curves, path):
    figure, axes = plot.subplots(1, 2, figsize=(11, 4.2))
    for curve in curves:
        users = [point["users"] for point in curve["points"]]
        for at, name in ((0, "p50_ms"), (1, "tokens_s")):
            axes[at].plot(users, [point[name] for point in curve["points"]], marker="o",
                          label=curve["recipe"])
    if len(curves) == 1:
        points = curves[0]["points"]
        axes[0].plot([point["users"] for point in points], [point["p99_ms"] for point in points],
                     linestyle=":", marker=".", label="p99")
    for axis, title in zip(axes, ("decode step, ms", "tokens per second in all")):
        axis.set_title(title)
        axis.set_xlabel("users of %d tokens" % curves[0]["tokens"])
        axis.set_ylim(bottom=0)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle("%s, %s, commit %s" % (curves[0]["model"], curves[0]["device"],
                                           curves[0]["commit"]))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plot.close(figure)
    print(path)


def main(arguments):
    paths, out, check = [], None, False
    while arguments:
        word = arguments.pop(0)
        if word == "--check":
            check = True
        elif word == "--out" and arguments:
            out = arguments.pop(0)
        elif word.startswith("--"):
            stop(2, "usage: plot_users.py [--check] [--out DIR] FILE...")
        else:
            paths.append(word)
    if not paths:
        stop(2, "usage: plot_users.py [--check] [--out DIR] FILE...")
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
        draw(pyplot, [curve], os.path.join(folder, "nine_%s.png" % curve["recipe"]))
    draw(pyplot, [curve for _, curve in curves], os.path.join(folder, "nine_overview.png"))


main(sys.argv[1:])
