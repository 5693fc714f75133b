// The line that says that the console does not answer. htmx does the rest, and nothing needs a script but that pages refresh.
"use strict";

(() => {
  let answered = new Date();
  function answers(yes) {
    if (yes) answered = new Date();
    document.getElementById("away-since").textContent = answered.toLocaleTimeString();
    document.getElementById("away").hidden = yes;
  }

  document.addEventListener("htmx:after:request", () => answers(true));
  document.addEventListener("htmx:error", () => answers(false));
  document.addEventListener("htmx:after:swap", () => {
    document.documentElement.dataset.swapped = "yes";
  });
})();
