// Images that users attach, as data: URLs no larger than what the model takes: they are kept with conversations.

const MAX_PIXELS = 4 << 20; // of an image that is kept, whatever the model takes
const MAX_FILE = 32 << 20; // bytes, as the server's
const KEPT = 1 << 20; // bytes of a file that is kept as it is, where it has no more pixels than the model takes
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml"; // an SVG is text

const asUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

// {name, url, width, height} of a file. pixels: that the model takes. Throws an Error with a message for users.
export async function readImage(file, pixels) {
  const name = file.name || "image";
  if (file.size > MAX_FILE) throw new Error(`it has more than ${MAX_FILE >> 20} MiB`);
  let shown;
  try {
    shown = await createImageBitmap(file); // upright, as its EXIF orientation says
  } catch {
    throw new Error("it is damaged, or of a type that this browser does not know");
  }
  try {
    const { width, height } = shown;
    const ratio = Math.min(1, Math.sqrt(Math.min(pixels, MAX_PIXELS) / (width * height)));
    if (ratio === 1 && file.size <= KEPT && TYPES.includes(file.type)) return { name, url: await asUrl(file), width, height };
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.floor(ratio * width));
    canvas.height = Math.max(1, Math.floor(ratio * height));
    const context = canvas.getContext("2d");
    context.fillStyle = "white"; // where it is transparent, as the server shows it
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingQuality = "high";
    context.drawImage(shown, 0, 0, canvas.width, canvas.height);
    const made = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
    if (!made) throw new Error("this browser cannot scale it down");
    return { name, url: await asUrl(made), width: canvas.width, height: canvas.height };
  } finally {
    shown.close();
  }
}
