"use strict";
(function () {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function dark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }
  function say() {
    theme.setAttribute("aria-pressed", String(dark()));
  }
  theme.addEventListener("click", function () {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("realvr-theme", root.dataset.theme);
    } catch (error) {
      // Storage is off: the choice lasts until the page is closed.
    }
    say();
  });
  system.addEventListener("change", say);
  say();

  // Without this script all panels are shown, one after the other.
  document.querySelectorAll(".switch").forEach(function (group) {
    const buttons = Array.from(group.querySelectorAll("button"));
    function choose(chosen) {
      buttons.forEach(function (button) {
        const on = button === chosen;
        button.setAttribute("aria-pressed", String(on));
        document.getElementById(button.dataset.panel).hidden = !on;
      });
    }
    buttons.forEach(function (button) {
      button.addEventListener("click", function () { choose(button); });
    });
    choose(buttons[0]);
  });

  document.querySelectorAll("button[data-shows]").forEach(function (button) {
    button.addEventListener("click", function () {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      const figures = document.getElementById(button.getAttribute("aria-controls"));
      figures.querySelectorAll('g[data-arm="' + button.dataset.shows + '"]').forEach(function (line) {
        line.style.display = on ? "" : "none";
      });
    });
  });

  // On paper everything is there.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (one) { one.open = true; });
  });
})();
