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
function show(text) {
  const inside = document.activeElement !== document.body && live.contains(document.activeElement);
  if (inside || window.getSelection().type === "Range") return; // somebody is at it
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
    events = new EventSource(live.dataset.events);
    events.onmessage = (event) => show(event.data);
    events.onerror = () => {
      if (events && events.readyState === EventSource.CLOSED) setTimeout(ask, 3000);
    };
  }
}
if (live) {
  document.addEventListener("visibilitychange", follow);
  follow();
}
