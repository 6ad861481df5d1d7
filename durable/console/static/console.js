// Shows every time in the reader's own zone; UTC stays in the title. Keeps the overview up to date.
"use strict";
const zoned = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
function localise(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = zoned.format(new Date(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}
localise(document);
document.addEventListener("htmx:afterSwap", () => localise(document));
// An answer that is no success, such as a login or a database that is away, is shown too.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status === 503 || event.detail.xhr.status === 401) window.location.reload();
});

// The server sends the live part of a page as events; where it sends none, the page asks for it now and then.
const live = document.getElementById("live");
const STALE = 10000; // milliseconds; news come every two seconds
let heard = Date.now();
function show(text) {
  heard = Date.now();
  const selection = window.getSelection();
  const selects = selection.type === "Range" && selection.containsNode(live, true);
  const inside = document.activeElement !== document.body && live.contains(document.activeElement);
  document.getElementById("held").hidden = !selects;
  if (inside || selects) return; // somebody is at it
  live.innerHTML = text;
  localise(live);
}
async function ask() {
  try {
    const answer = await fetch(live.dataset.part, { headers: { "HX-Request": "true" } });
    if (answer.redirected || answer.status === 401) return window.location.reload();
    if (answer.ok) show(await answer.text());
  } catch { /* the console is away: asked again */ }
  setTimeout(ask, 3000);
}
// A browser opens few connections to a server: only a page that is looked at holds one.
let events = null;
function follow() {
  if (document.hidden) {
    if (events) events.close();
    events = null;
  } else if (!events) {
    heard = Date.now();
    events = new EventSource(live.dataset.events);
    events.onmessage = (event) => show(event.data);
    events.onerror = () => {
      if (events && events.readyState === EventSource.CLOSED) setTimeout(ask, 3000);
    };
  }
}
if (live) {
  setInterval(() => {
    const stale = document.getElementById("stale");
    if (stale.hidden) document.getElementById("heard").textContent = zoned.format(new Date(heard));
    stale.hidden = document.hidden || Date.now() - heard < STALE;
  }, 1000);
  document.addEventListener("visibilitychange", follow);
  follow();
}
