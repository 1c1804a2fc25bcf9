"use strict";
const tip = document.getElementById("tip");
function show(words, x, y) {
  tip.textContent = words; tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (y + box.height + 24 > innerHeight ? y - box.height - 12 : y + 16) + "px";
}
document.addEventListener("pointermove", e => {
  const at = e.target.closest("[data-tip]");
  if (at) show(at.dataset.tip, e.clientX, e.clientY); else tip.hidden = true;
});
document.addEventListener("focusin", e => {
  if (!e.target.dataset || !e.target.dataset.tip) return;
  const box = e.target.getBoundingClientRect();
  show(e.target.dataset.tip, box.left, box.top + Math.min(box.height, 40));
});
document.addEventListener("focusout", () => { tip.hidden = true; });
document.addEventListener("keydown", e => { if (e.key === "Escape") tip.hidden = true; });
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme:dark)");
document.getElementById("theme").addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
