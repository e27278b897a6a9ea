// Curves by training step.

import uPlot from "./vendor/uplot.js";
import { el, number } from "./dom.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Draws `{step: [...], name: [...]}` into a box of its own, which follows the width of its place. */
export function chart(title, curves) {
  const place = el("div");
  const box = el("section", { class: "chart", "aria-label": `${title} by training step` }, el("h3", {}, title), place);
  const names = Object.keys(curves).filter((name) => name !== "step");
  const strokes = [color("--accent"), color("--wait")];
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const value = (_, one) => number(one);
  const options = {
    width: 300, height: 190, scales: { x: { time: false } },
    axes: [{ ...axis }, { ...axis, size: 64, values: (_, those) => those.map((one) => number(one)) }],
    series: [{ label: "step" }, ...names.map((name, at) => (
      { label: name.replaceAll("_", " "), stroke: strokes[at], width: 1.75, points: { show: curves.step.length < 3 }, value }))],
    cursor: { drag: { x: true, y: false } },
  };
  let plot = null;
  const resized = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (!width) return;
    if (plot === null) plot = new uPlot(options, [curves.step, ...names.map((name) => curves[name])], place);
    else if (plot.width !== width) plot.setSize({ width, height: 190 });
  });
  resized.observe(place);
  return {
    box,
    update: (next) => plot?.setData([next.step, ...names.map((name) => next[name])]),
    close: () => { resized.disconnect(); plot?.destroy(); },
  };
}
