// Shows every time in the reader's own zone; UTC stays in the title.
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
