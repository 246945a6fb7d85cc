// Messages have values of a run in them, so entries are ranked by the number of common words.
function words(text) {
  return new Set((text.toLowerCase().match(/[a-z_]{3,}/g) || []));
}

function rank(text, entries) {
  const asked = words(text);
  const scored = entries.map((entry) => {
    const fact = [...words(entry.dataset.fact || entry.textContent)];
    const shared = fact.filter((word) => asked.has(word)).length;
    return [entry, fact.length ? (shared * shared) / fact.length : 0];
  });
  return scored.filter((one) => one[1] > 0.5).sort((a, b) => b[1] - a[1]).slice(0, 5).map((one) => one[0]);
}

document.addEventListener("DOMContentLoaded", () => {
  const asked = new URLSearchParams(window.location.search).get("q") || "";
  const box = document.getElementById("message");
  if (box) {
    const answers = document.getElementById("message-answers");
    const entries = [...document.querySelectorAll("[data-fact]")];
    const show = () => {
      const found = rank(box.value, entries).map((entry) => entry.cloneNode(true));
      answers.replaceChildren(...(box.value && !found.length ? ["No entry has these words."] : found));
    };
    box.addEventListener("input", show);
    box.value = asked;
    show();
  } else if (/\/search\.html$/.test(window.location.pathname) && words(asked).size > 2) {
    const link = document.createElement("a");
    link.href = "messages.html?q=" + encodeURIComponent(asked);
    link.textContent = "Is this an error message of tpukit? Look for it among the messages.";
    document.getElementById("search-results").before(link);
  }
});
