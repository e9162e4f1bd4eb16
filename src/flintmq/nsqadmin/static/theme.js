// Before anything is painted: the theme that was chosen in this browser; without one, the system's.
(() => {
  const theme = (() => {
    try {
      return localStorage.getItem("flintmq-theme");
    } catch {
      return null; // storage is forbidden
    }
  })();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.bsTheme = theme;
})();
